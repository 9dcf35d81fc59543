"""Other ways to compute the attention of ragged requests, right and wrong, and an independent check: for checks.py.

Agents do not see this file either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.attention.common import Attend

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of some keys: the largest logit, the sum of powers of 2 below it, and the values weighted by these."""
Visible = Callable[[int, int], tuple[int, int]]
"""Of n queries and m keys: (a, b) such that query i sees key j iff j <= i + a and j < b."""
INDEPENDENT = "scaled_dot_product_attention by request and head in float64 with rows found one by one; math.fsum"
LOWEST = -1e30
"""Below every logit, and finite: LOWEST - LOWEST is no NaN."""
KEY_BLOCKS = 8
MANY_LOGITS = 20_000_000
EXACT_KEYS = 300
LN_2 = math.log(2)


# -- right ways and faults ---------------------------------------------------------------------------------------------


def at_end(n: int, m: int) -> tuple[int, int]:
    """The rule: the last query sees every key."""
    return m - n, m


def at_start(n: int, m: int) -> tuple[int, int]:
    """Wrong: query 0 sees key 0 only, as if there were no prefix."""
    return 0, m


def without_own(n: int, m: int) -> tuple[int, int]:
    """Wrong: the diagonal is left out."""
    return m - n - 1, m


def with_next(n: int, m: int) -> tuple[int, int]:
    """Wrong: the diagonal is one key too far."""
    return m - n + 1, m


def with_all(n: int, m: int) -> tuple[int, int]:
    """Wrong: no mask."""
    return m, m


def in_pages(page: int) -> Visible:
    """Wrong: the diagonal ends at the last page's end instead of the last token."""
    return lambda n, m: (-(-m // page) * page - n, m)


def whole_tiles(tile: int) -> Visible:
    """Wrong: the keys after the last whole tile are left out, unless there is none."""
    return lambda n, m: (m - n, m // tile * tile or m)


def first_keys(limit: int) -> Visible:
    """Wrong: a request has no more than ``limit`` keys."""
    return lambda n, m: (m - n, min(m, limit))


def consecutive(heads: int, kv_heads: int) -> list[int]:
    """The rule: neighbouring query heads share a key/value head."""
    return [head // (heads // kv_heads) for head in range(heads)]


def interleaved(heads: int, kv_heads: int) -> list[int]:
    """Wrong: every ``kv_heads``-th query head shares a key/value head."""
    return [head % kv_heads for head in range(heads)]


def blocked(
    block: int = 64,
    probabilities: torch.dtype = torch.bfloat16,
    *,
    visible: Visible = at_end,
    head_of: Callable[[int, int], list[int]] = consecutive,
    split: bool = False,
    merge: Callable[[torch.Tensor], torch.Tensor] = torch.exp2,
    shifted: bool = True,
) -> Attend:
    """Softmax in base 2 over blocks of keys, in float32, as kernels have it.

    Args:
        block: keys of a block; more where a request would have more than ``KEY_BLOCKS`` blocks.
        probabilities: what they are rounded to before they meet the values.
        visible: which keys a query sees.
        head_of: the key/value head of each query head.
        split: normalise every block and merge the results by their log-sum-exp, instead of one running softmax.
        merge: weight of a block in such a merge, of lse - max lse.
        shifted: subtract the largest logit before powers are taken; wrong without.
    """

    def attention(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n, m = len(q), len(keys)
        offset, end = visible(n, m)
        heads = head_of(q.shape[1], keys.shape[1])
        seen = torch.arange(m, device=q.device) <= torch.arange(n, device=q.device)[:, None] + offset
        seen &= torch.arange(m, device=q.device) < end
        queries = q.float().transpose(0, 1) * (scale / LN_2)
        step = max(block, -(-m // KEY_BLOCKS))
        states: list[State] = []
        for begin in range(0, m, step):
            part = slice(begin, begin + step)
            logits = queries @ keys[part].float()[:, heads].permute(1, 2, 0)
            logits.masked_fill_(~seen[:, part], -math.inf)
            top = logits.amax(dim=-1, keepdim=True).clamp_min(LOWEST)
            if not shifted:
                top.zero_()
            p = torch.exp2(logits - top)
            total = p.sum(dim=-1, keepdim=True)
            weighted = p.to(probabilities).float() @ values[part].float()[:, heads].transpose(0, 1)
            states.append((top, total, weighted))
            if not split:
                states = [_joined(states)]
        output, lse = _merged(states, merge) if split else _normalised(*states[0])
        return output.transpose(0, 1).to(q.dtype), lse[..., 0].T

    return attention


def _joined(states: Sequence[State]) -> State:
    """One running softmax of one or two."""
    if len(states) == 1:
        return states[0]
    top = torch.maximum(states[0][0], states[1][0])
    sums = [[value * torch.exp2(state[0] - top) for value in state[1:]] for state in states]
    return top, sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]


def _normalised(top: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 lse; 0 and -inf where nothing was seen."""
    empty = total == 0
    return (weighted / total).masked_fill(empty, 0.0), (top + total.log2()).masked_fill(empty, -math.inf)


def _merged(
    states: Sequence[State], merge: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks' own results, merged by their lse."""
    results = [_normalised(*state) for state in states]
    lses = torch.stack([lse for _, lse in results])
    top = lses.amax(dim=0).clamp_min(LOWEST)
    weights = merge(lses - top)
    weighted = sum(weight * output for weight, (output, _) in zip(weights, results, strict=True))
    return _normalised(top, weights.sum(dim=0), torch.as_tensor(weighted))


def altered(reference: Callable[..., Any], change: Callable[[Any], Any], *places: int) -> Callable[..., Any]:
    """Wrong: ``reference`` with the inputs at ``places`` changed."""

    def call(*inputs: Any) -> Any:
        values = list(inputs)
        for place in places:
            values[place] = change(values[place])
        return reference(*values)

    return call


def with_scale(reference: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Wrong: ``reference`` with ``factor`` times its ``sm_scale``, the last input."""
    return altered(reference, lambda scale: factor * scale, -1)


def natural_lse(outputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: the lse to base e."""
    return outputs[0], outputs[1] * LN_2


def nan_in_empty(outputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: rows that see nothing are 0 / 0."""
    return outputs[0].masked_fill(outputs[1].isneginf()[..., None], math.nan), outputs[1]


# -- the independent check ---------------------------------------------------------------------------------------------


def paged_rows(
    kv_indptr: torch.Tensor, kv_indices: torch.Tensor, page: int = 1, last: torch.Tensor | None = None
) -> Callable[[int], list[int]]:
    """Of a request: the cache rows of its tokens, token by token."""
    bounds, ids = kv_indptr.tolist(), kv_indices.tolist()
    fills = None if last is None else last.tolist()

    def rows_of(request: int) -> list[int]:
        pages = ids[bounds[request] : bounds[request + 1]]
        length = (len(pages) - 1) * page + (fills[request] if fills else page) if pages else 0
        return [pages[token // page] * page + token % page for token in range(length)]

    return rows_of


def check_requests(
    q: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    queries: Sequence[tuple[int, int]],
    rows_of: Callable[[int], list[int]],
    scale: float,
    truth: Sequence[torch.Tensor],
) -> None:
    """Every request, or with more than ``MANY_LOGITS`` logits a sample of requests, heads and queries.

    Args:
        q: [queries, heads, D], as drawn.
        key_rows: [rows, kv_heads, D].
        value_rows: [rows, kv_heads, Dv].
        queries: first and last + 1 query of each request.
        rows_of: the rows of a request's keys, in order.
        scale: factor of the logits.
        truth: output and lse, float64.
    """
    order = sorted(range(len(queries)), key=lambda b: (queries[b][1] - queries[b][0], len(rows_of(b))))
    logits = q.shape[1] * sum((end - begin) * len(rows_of(b)) for b, (begin, end) in enumerate(queries))
    many = logits > MANY_LOGITS
    if many:
        order = sorted({*order[:6], *order[6:-1:6], *order[-2:]})
    for b in order:
        _check_request(q, key_rows, value_rows, queries[b], rows_of(b), scale, truth, many)


def _check_request(
    q: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    span: tuple[int, int],
    rows: list[int],
    scale: float,
    truth: Sequence[torch.Tensor],
    sample: bool,
) -> None:
    (begin, end), m, heads = span, len(rows), q.shape[1]
    n, blind = end - begin, min(end - begin, max(0, end - begin - m))
    assert not truth[0][begin : begin + blind].any(), "a query without keys has an output"
    assert bool((truth[1][begin : begin + blind] == -math.inf).all()), "a query without keys has an lse"
    if blind == n:
        return
    chosen = range(blind, n) if not sample else sorted({blind, n - 1, *range(blind, n, max(1, (n - blind) // 32))})
    mine, places = (torch.tensor(list(numbers), device=q.device) for numbers in (chosen, rows))
    mask = torch.arange(m, device=q.device) <= mine[:, None] + (m - n)
    for head in range(heads) if not sample else (0, heads // 2 + 1, heads - 1):
        group = head * key_rows.shape[1] // heads
        keys, values = (table[places, group].double() for table in (key_rows, value_rows))
        own = q[begin + mine, head].double()
        want = torch.nn.functional.scaled_dot_product_attention(
            own[None], keys[None], values[None], attn_mask=mask, scale=scale
        )
        torch.testing.assert_close(truth[0][begin + mine, head], want[0], rtol=1e-9, atol=1e-12)
        powers = ((own @ keys.T) * scale).exp() * mask
        torch.testing.assert_close(truth[1][begin + mine, head], powers.sum(dim=1).log2(), rtol=1e-9, atol=1e-12)
    if m <= EXACT_KEYS:
        last = [result[end - 1, head] for result in truth]
        _check_by_hand(own[-1].tolist(), keys.tolist(), values[:, -1].tolist(), scale, last)


def _check_by_hand(
    query: list[float], keys: list[list[float]], channel: list[float], scale: float, truth: Sequence[Any]
) -> None:
    """The last channel of the last query, which sees all keys, with sums that Python takes exactly."""
    weights = [math.exp(math.fsum(a * b for a, b in zip(query, key, strict=True)) * scale) for key in keys]
    total = math.fsum(weights)
    want = math.fsum(w * v for w, v in zip(weights, channel, strict=True)) / total
    assert math.isclose(float(truth[0][-1]), want, rel_tol=1e-9, abs_tol=1e-12), (float(truth[0][-1]), want)
    assert math.isclose(float(truth[1]), math.log2(total), rel_tol=1e-9, abs_tol=1e-12), (float(truth[1]), total)
