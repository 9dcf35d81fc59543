"""What several attention problems have in common: pure functions of tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Shape, Spec
from mkb_env.problems.drawing import normal, offsets, permutation

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""Attention of one request: (q, keys, values, scale) -> (output, lse), by the rule of :func:`attend_requests`."""
Requests = list[tuple[slice, slice]]
"""Per request: where its queries are, and where the rows of its keys and values."""
QUERIES_AT_ONCE = 512
ELEMENTS_AT_ONCE = 1 << 26
"""Of logits, and of gathered keys: bounds what a padded group of requests takes."""


def half_turn(x: torch.Tensor) -> torch.Tensor:
    """The quarter turn of every pair (i, i + D/2) of the last axis: (-second half, first half)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary_frequencies(channels: int, theta: float, device: torch.device) -> torch.Tensor:
    """``theta``^(-2i / channels) for i < channels / 2, float64."""
    return theta ** -(torch.arange(0, channels, 2, device=device, dtype=torch.float64) / channels)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which stays with size 1."""
    return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """A float32 tensor rounded to the 10 fraction bits of TF32, as operands of tensor cores are."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def tf32_allowance(anchor: torch.Tensor, zeros: bool = False) -> Allowance:
    """Allowed absolute error: 1e-2 (|x| + rms of the output), which 1 of 1000 elements may exceed up to four times.

    Operands rounded to TF32 cost 2e-3 of the rms on average. Rows (heads) differ in size, the logits of peaked rows are
    large, and gradients cancel, so single elements, 1 in 10^5, err by more than 1e-2. With ``zeros``, rows (last axis)
    whose truth is 0 must be 0.
    """
    usual = 1e-2 * (anchor.abs() + anchor.square().mean().sqrt())
    if zeros:
        usual = usual.masked_fill((anchor == 0).all(dim=-1, keepdim=True), 0.0)
    return Allowance(limit=4 * usual, usual=usual, share=1e-3)


# -- requests with queries and keys of their own: softmax attention, causal and aligned at the end ---------------------


def attend_requests(
    q: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    requests: Requests,
    scale: float,
    attention: Attend | None = None,
    order: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each request's queries over its keys, in float32 or wider.

    Of a request's n queries and m keys, query i sees key j iff j <= i + m - n; a single query sees every key. Query
    head h reads key/value head h // (heads / kv_heads). Rows that see no key have output 0 and lse -inf.

    Args:
        q: [queries, heads, D].
        key_rows: [rows, kv_heads, D].
        value_rows: [rows, kv_heads, Dv].
        requests: queries and rows of each request.
        scale: factor of the logits.
        attention: of one request, in place of this one; it returns the last rows, or all.
        order: which rows come one after another, where ``requests`` does not mean the rows as they lie.

    Returns:
        Output [queries, heads, Dv] in q's dtype; base-2 log-sum-exp [queries, heads], float32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if order is not None:
        key_rows, value_rows = key_rows[order], value_rows[order]
    keys, values = key_rows.to(wide), value_rows.to(wide)
    output = q.new_zeros(len(q) + 1, *q.shape[1:-1], values.shape[-1])  # the last row is for padding
    lse = torch.full(output.shape[:2], -math.inf, dtype=wide, device=q.device)
    if attention is None:
        for part in _alike(requests, q.shape[1], keys[0].numel()):
            _attend_alike(q, keys, values, part, scale, (output, lse))
        return output[:-1], lse[:-1]
    for queries, rows in requests:
        if queries.start < queries.stop and rows.start < rows.stop:
            found, sums = attention(q[queries], keys[rows], values[rows], scale)
            last = slice(queries.stop - len(found), queries.stop)
            output[last], lse[last] = found, sums
    return output[:-1], lse[:-1]


def _alike(requests: Requests, heads: int, width: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Requests of similar size, as (first query, queries, first key, keys) of those queries that see a key.

    Numbers of queries, at most ``QUERIES_AT_ONCE``, and of keys are within a factor of two in each list.
    """
    groups = defaultdict(list)
    for queries, rows in requests:
        n, m = queries.stop - queries.start, rows.stop - rows.start
        for begin in range(max(0, n - m), n, QUERIES_AT_ONCE):
            end = min(begin + QUERIES_AT_ONCE, n)
            seen = m - n + end  # keys that the last of these queries sees
            size = (end - begin - 1).bit_length(), (seen - 1).bit_length()
            groups[size].append((queries.start + begin, end - begin, rows.start, seen))
    for (n, m), group in groups.items():
        most = max(1, ELEMENTS_AT_ONCE // max(heads << (n + m), width << m))
        yield from (group[first : first + most] for first in range(0, len(group), most))


def _attend_alike(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: list[tuple[int, int, int, int]],
    scale: float,
    results: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Attention of R requests, padded to the largest, into the output and the lse."""
    first_query, n, first_key, m = torch.tensor(part, device=q.device)[..., None].unbind(1)
    i, j = (torch.arange(max(sizes), device=q.device) for sizes in list(zip(*part, strict=True))[1::2])
    rows = (first_key + j).clamp(max=len(keys) - 1)
    own = q[(first_query + i).clamp(max=len(q) - 1)].to(keys.dtype)
    queries = own.unflatten(2, (keys.shape[1], -1)).transpose(1, 2)  # [R, kv_heads, N, G, D]
    # Rows past a request's keys may hold NaN, and 0 times NaN is NaN.
    present = (j < m)[..., None, None]
    own_keys, own_values = keys[rows].transpose(1, 2), values[rows].masked_fill_(~present, 0.0).transpose(1, 2)
    hidden = j > i[:, None] + (m - n)[..., None]
    logits = queries.flatten(2, 3) @ own_keys.mT * scale
    logits.unflatten(2, queries.shape[2:4]).masked_fill_(hidden[:, None, :, None], -math.inf)
    output, lse = logits.softmax(dim=-1) @ own_values, logits.logsumexp(dim=-1) / math.log(2)
    places = torch.where(i < n, first_query + i, len(q))
    for result, found in zip(results, (output, lse), strict=True):
        by_query = found.unflatten(2, queries.shape[2:4]).transpose(1, 2).flatten(2, 3)
        result[places] = by_query.to(result.dtype)


def spans(indptr: torch.Tensor) -> list[slice]:
    """The ranges between neighbours of an indptr."""
    return [slice(begin, end) for begin, end in pairwise(indptr.tolist())]


def singles(count: int) -> list[slice]:
    """One row per request."""
    return [slice(row, row + 1) for row in range(count)]


def paged(
    queries: list[slice],
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None = None,
    page: int = 1,
) -> tuple[Requests, torch.Tensor]:
    """Requests whose keys lie in listed pages of ``page`` rows, of which the last holds ``kv_last_page_len`` rows.

    Returns:
        The requests over the rows of all listed pages, and where these rows are in the cache, int64.
    """
    rows = (kv_indices.long()[:, None] * page + torch.arange(page, device=kv_indices.device)).flatten()
    fills = [page] * len(queries) if kv_last_page_len is None else kv_last_page_len.tolist()
    requests: Requests = []
    for own, pages, fill in zip(queries, spans(kv_indptr), fills, strict=True):
        begin, end = pages.start * page, pages.stop * page
        requests.append((own, slice(begin, end - page + fill if end > begin else end)))
    return requests, rows


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    attention: Attend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query per request over a cache of one-token pages; float64 inputs are computed in float64."""
    requests, rows = paged(singles(len(q)), kv_indptr, kv_indices)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return attend_requests(q, keys, values, requests, sm_scale, attention, rows)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    attention: Attend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over a cache of one-token pages; float64 inputs are computed in float64."""
    requests, rows = paged(spans(qo_indptr), kv_indptr, kv_indices)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return attend_requests(q, keys, values, requests, sm_scale, attention, rows)


def page_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
    attention: Attend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over a cache of longer pages; float64 inputs are computed in float64."""
    requests, rows = paged(spans(qo_indptr), kv_indptr, kv_indices, kv_last_page_len, k_cache.shape[1])
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return attend_requests(q, keys, values, requests, sm_scale, attention, rows)


def ragged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
    attention: Attend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over contiguous keys and values; float64 inputs are computed in float64."""
    requests: Requests = list(zip(spans(qo_indptr), spans(kv_indptr), strict=True))
    return attend_requests(q, k, v, requests, sm_scale, attention)


def softmax_allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Allowed absolute error: 1.6e-2 (|x| + rms of x over its head) for ``output``, 2e-3 for ``lse``.

    The first admits probabilities rounded to bfloat16 at any length: m nearly uniform keys give an output of rms
    sqrt(e / m), so a fixed absolute term would accept zeros. Rows that see no key must be exactly 0.
    """
    if name == "lse":
        return torch.full_like(anchor, 2e-3)
    return 1.6e-2 * (anchor.abs() + anchor.square().mean(dim=-1, keepdim=True).sqrt())


# -- their workloads: "lengths" (one query each) or "requests" ([queries, keys] each), "P" pages, "poison", ... --------


@dataclass(frozen=True)
class Counts:
    """What follows from the requests of a workload."""

    requests: int
    queries: int
    keys: int
    pages: int
    read: int
    """Different keys that some query sees: those of a shared prefix count once."""
    pairs: int
    """(query, key) with the key visible to the query."""


def requests_of(shape: Shape) -> list[list[int]]:
    """[queries, keys] of every request."""
    return shape["requests"] if "requests" in shape else [[1, length] for length in shape["lengths"]]


def page_counts(shape: Shape, page: int = 1) -> list[int]:
    """Pages of every request."""
    return [-(-keys // page) for _, keys in requests_of(shape)]


def counts(shape: Shape, page: int = 1) -> Counts:
    """The sums over a workload's requests."""
    requests, pages, prefix = requests_of(shape), page_counts(shape, page), shape.get("shared_prefix", 0)
    reading = [(keys, own) for (queries, keys), own in zip(requests, pages, strict=True) if queries]
    sharing = sum(own > prefix > 0 for _, own in reading)
    return Counts(
        requests=len(requests),
        queries=sum(queries for queries, _ in requests),
        keys=sum(keys for _, keys in requests),
        pages=sum(pages),
        read=sum(keys for keys, _ in reading) - page * prefix * max(0, sharing - 1),
        pairs=sum(n * m - n * (n - 1) // 2 if n <= m else m * (m + 1) // 2 for n, m in requests),
    )


def layout(shape: Shape, page: int = 1) -> dict[str, list[int]]:
    """``qo_indptr`` and ``kv_indptr`` (in pages), and ``kv_last_page_len`` (0 in requests without pages)."""
    requests, pages = requests_of(shape), page_counts(shape, page)
    return {
        "qo_indptr": offsets([queries for queries, _ in requests]),
        "kv_indptr": offsets(pages),
        "kv_last_page_len": [
            keys - (own - 1) * page if own else 0 for (_, keys), own in zip(requests, pages, strict=True)
        ],
    }


def draw_inputs(
    generator: torch.Generator, shape: Shape, names: Sequence[str], specs: Sequence[Spec], page: int = 1
) -> tuple[Any, ...]:
    """Standard normal tensors, the workload's layout, a random placement of pages and the scalars, in ``names``' order.

    Pages are different in all requests, but for ``shared_prefix`` = s: then all requests of more than s pages have the
    first s pages of the first such request. With ``poison`` every row of a cache that no request lists holds NaN, the
    unused rows of last pages among them. With ``loud`` = [n, f] the first n queries are f times as large.
    """
    known, pages = layout(shape, page), page_counts(shape, page)
    values: dict[str, Any] = {}
    for name, spec in zip(names, specs, strict=True):
        if not isinstance(spec, tuple):
            values[name] = spec
        elif name == "kv_indices":
            values[name] = _placement(generator, pages, shape["P"], shape.get("shared_prefix", 0))
        elif name in known:
            values[name] = torch.tensor(known[name], dtype=torch.int32, device=generator.device)
        else:
            values[name] = normal(generator, *spec[0], dtype=spec[1])
            if name in ("q", "q_nope", "q_pe"):
                amplify(values[name], shape)
    if shape.get("poison"):
        listed = _listed(values["kv_indices"], shape, page)
        for name in names:
            if name.endswith("_cache"):
                cache = values[name]
                cache.masked_fill_(~listed.view(*listed.shape, *[1] * (cache.dim() - 2)), math.nan)
    return tuple(values.values())


def amplify(queries: torch.Tensor, shape: Shape) -> None:
    """Multiply the first n queries by f, in place, where the workload has ``loud`` = [n, f]: logits of hundreds."""
    count, factor = shape.get("loud", (0, 1))
    queries[:count] *= factor


def _placement(generator: torch.Generator, pages: Sequence[int], pool: int, prefix: int) -> torch.Tensor:
    """Page ids of all requests, one request after another."""
    ids = permutation(generator, pool)[: sum(pages)].clone()
    sharing = [begin for begin, own in zip(offsets(pages), pages, strict=False) if own > prefix > 0]
    for begin in sharing[1:]:
        ids[begin : begin + prefix] = ids[sharing[0] : sharing[0] + prefix]
    return ids


def _listed(ids: torch.Tensor, shape: Shape, page: int) -> torch.Tensor:
    """Which rows of which pages belong to a request, bool [P, page]."""
    fills = torch.full((len(ids), 1), page, device=ids.device)
    known = layout(shape, page)
    last = [
        (end - 1, fill) for end, fill in zip(known["kv_indptr"][1:], known["kv_last_page_len"], strict=True) if fill
    ]
    places, rows = torch.tensor(last, device=ids.device).view(-1, 2).unbind(1)
    fills[places] = rows[:, None]
    listed = torch.zeros(shape["P"], page, dtype=torch.bool, device=ids.device)
    listed[ids.long()] = fills > torch.arange(page, device=ids.device)
    return listed
