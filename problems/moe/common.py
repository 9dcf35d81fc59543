"""What several mixture-of-experts problems share: drawing weights, choosing experts, running them, one tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch

# -- inputs ------------------------------------------------------------------------------------------------------------


def large_normal(
    generator: torch.Generator, *sizes: int, scale: float, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """``scale N(0, 1)``, drawn in ``dtype`` without a wider temporary: for weights of gigabytes."""
    return torch.empty(sizes, dtype=dtype, device=generator.device).normal_(0.0, scale, generator=generator)


def per_expert(
    count: int, groups: Iterable[tuple[Sequence[int], float]], device: torch.device, default: float = 0.0
) -> torch.Tensor:
    """A value for each of ``count`` experts: that of its group of (experts, value), else ``default``; float32."""
    values = {expert: value for experts, value in groups for expert in experts}
    return torch.tensor([values.get(expert, default) for expert in range(count)], device=device)


def gaps(values: torch.Tensor, k: int) -> torch.Tensor:
    """Differences of neighbours among the ``k`` + 1 largest of each row, [..., k]; the last decides who is chosen."""
    top = values.topk(k + 1, dim=-1).values
    return top[..., :-1] - top[..., 1:]


# -- routing -----------------------------------------------------------------------------------------------------------


def best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the ``k`` largest of each row, largest first; of equal values the lower index comes first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def group_scores(scores: torch.Tensor, n_group: int) -> torch.Tensor:
    """The sum of the two largest scores in each of ``n_group`` groups of consecutive experts, [..., n_group]."""
    return scores.unflatten(-1, (n_group, -1)).topk(2, dim=-1).values.sum(dim=-1)


def in_best_groups(scores: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    """The scores, with -inf outside each row's ``topk_group`` groups of the largest group score."""
    groups = scores.unflatten(-1, (n_group, -1))
    kept = best(group_scores(scores, n_group), topk_group)
    dropped = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, kept, False)
    return groups.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(-2)


def choose_by_sorting(values: Sequence[float], k: int) -> list[int]:
    """:func:`best` for one row in plain Python, for checks."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:k]


# -- experts -----------------------------------------------------------------------------------------------------------


def by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of a flat list of expert ids by expert: their order, and where each group begins and the last ends.

    The order is stable; entries of ids from ``count`` on come last, in no group.
    """
    sizes = experts.bincount(minlength=count)[:count]
    return experts.argsort(stable=True), torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


def sum_of_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    mlp: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """sum_j weights[t, j] mlp(chosen[t, j], x[t]) for every row t, over the choices in [0, ``count``).

    ``mlp(e, rows)`` is called once for each expert that has rows.
    """
    here = torch.where((chosen >= 0) & (chosen < count), chosen, count)
    order, bounds = by_expert(here.flatten(), count)
    result = torch.zeros_like(x)
    for expert, (begin, end) in enumerate(pairwise(bounds.tolist())):
        if begin == end:
            continue
        pairs = order[begin:end]
        tokens = pairs // chosen.shape[1]
        result.index_add_(0, tokens, mlp(expert, x[tokens]) * weights.flatten()[pairs].unsqueeze(-1))
    return result


def swiglu(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    """(silu(gate) up) w_downᵀ with [gate, up] = x w_gate_upᵀ, each of the three results rounded to x's dtype.

    The activation is computed in float32 or wider. Leading axes are a batch.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = (x @ w_gate_up.to(x.dtype).mT).to(wide).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype) @ w_down.to(x.dtype).mT


def routed_swiglu(
    x: torch.Tensor, chosen: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, at_once: int = 16
) -> torch.Tensor:
    """:func:`swiglu` of every row of x by each of its chosen experts, [T, k, H].

    ``at_once`` consecutive experts are one batch, padded to the longest of them: hundreds of experts with a handful of
    rows each would otherwise take thousands of launches.
    """
    tokens, k = chosen.shape
    order, bounds = by_expert(chosen.flatten(), len(w_down))
    lengths = bounds.diff().tolist()
    y = x.new_empty(tokens * k + 1, x.shape[1])  # one more: padding ends there
    for first in range(0, len(lengths), at_once):
        batch = slice(first, min(first + at_once, len(lengths)))
        longest = max(lengths[batch])
        if not longest:
            continue
        places = bounds[:-1][batch, None] + torch.arange(longest, device=x.device)
        pairs = order[places.clamp(max=tokens * k - 1)]
        rows = swiglu(x[pairs // k], w_gate_up[batch], w_down[batch])
        y[torch.where(places < bounds[1:][batch, None], pairs, tokens * k)] = rows
    return y[:-1].view(tokens, k, -1)


def expected_hits(experts: int, tokens: int, k: int) -> int:
    """How many of ``experts`` at least one token chooses, if each of them chooses ``k`` at random."""
    return max(1, round(experts * (1 - (1 - k / experts) ** tokens)))


# -- tolerance ---------------------------------------------------------------------------------------------------------


def float32_limit(scale: torch.Tensor, length: int) -> torch.Tensor:
    """Allowed error of results of a few matrix products in float32: eps max(32, 2 sqrt(length)) ``scale``.

    A float32 sum of ``length`` products in plain order errs by about eps sqrt(length) / 5 root mean square and by about
    eps sqrt(length) in the worst of some million; short sums err by what a handful of roundings, some of them cut off
    as tensor cores do, and approximate exponentials add up to. The reference may add in a better order, so its own
    error is no measure. Single products of bfloat16 or TF32 operands err several times more than this allows.
    """
    return torch.finfo(torch.float32).eps * max(32.0, 2 * math.sqrt(length)) * scale


def tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 numbers rounded to TF32's 11 significant bits, for checks."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def split_tf32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product with each operand as a sum of two TF32 numbers, without the product of the lower ones; for checks."""
    high_a, high_b = tf32(a), tf32(b)
    return tf32(a - high_a) @ high_b + high_a @ tf32(b - high_b) + high_a @ high_b
