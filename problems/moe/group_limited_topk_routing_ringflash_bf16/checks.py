"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.moe.common import best, choose_by_sorting, in_best_groups

INDEPENDENT = "token by token in plain Python on float64 sums; transformers' DeepSeek-V3 router in float32"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Choices and weights of all tokens, of large shapes of 256; the histogram of all choices."""
    x, gate_w, bias, n_group, topk_group, k, scale = inputs
    chosen, weights, counts = truth
    size, biases = len(gate_w) // n_group, bias.double().tolist()
    tokens = torch.randperm(len(x))[:256].to(x.device)
    sums = torch.stack([(x[tokens].double() * row.double()).sum(1) for row in gate_w], dim=1)
    rows = torch.zeros(len(tokens), k, dtype=torch.float64)
    for i, z in enumerate(sums.tolist()):
        s = [1 / (1 + math.exp(-value)) for value in z]
        b = [value + shift for value, shift in zip(s, biases, strict=True)]
        scores = [sum(sorted(b[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
        kept = choose_by_sorting(scores, topk_group)
        allowed = [value if e // size in kept else -math.inf for e, value in enumerate(b)]
        want = choose_by_sorting(allowed, k)
        assert chosen[tokens[i]].tolist() == want, f"token {int(tokens[i])} chooses {want}"
        rows[i] = torch.tensor([scale * s[e] / math.fsum(s[c] for c in want) for e in want], dtype=torch.float64)
    torch.testing.assert_close(weights[tokens].cpu(), rows, rtol=1e-9, atol=0)
    seen = Counter(chosen.flatten().tolist())
    assert counts.tolist() == [seen[e] for e in range(len(gate_w))], "counts differ"
    _transformers(inputs, truth)


def _transformers(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The library's router, which works in float32 and returns the choices in no certain order."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    x, gate_w, bias, n_group, topk_group, k, scale = inputs
    config = DeepseekV3Config(
        hidden_size=x.shape[1],
        n_routed_experts=len(gate_w),
        num_experts_per_tok=k,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=scale,
        norm_topk_prob=True,
    )
    router = DeepseekV3TopkRouter(config).to(x.device)
    router.load_state_dict({"weight": gate_w, "e_score_correction_bias": bias}, strict=True)
    with torch.no_grad():
        _, weights, chosen = router(x)
    order, mine = chosen.argsort(dim=-1), truth[0].argsort(dim=-1)
    assert torch.equal(chosen.gather(1, order), truth[0].long().gather(1, mine)), "choices differ"
    torch.testing.assert_close(weights.gather(1, order).double(), truth[1].gather(1, mine), rtol=2e-5, atol=0)


def _product(x: torch.Tensor, gate_w: torch.Tensor) -> torch.Tensor:
    return x.float() @ gate_w.float().T


def _truncating(x: torch.Tensor, gate_w: torch.Tensor) -> torch.Tensor:
    """16 channels at a time, the sum cut off to 24 bits after each step, as tensor cores may do."""
    z = torch.zeros(len(x), len(gate_w), device=x.device)
    for begin in range(0, x.shape[1], 16):
        part = slice(begin, begin + 16)
        exact = z.double() + x[:, part].double() @ gate_w[:, part].double().T
        rounded = exact.float()
        above = rounded.double().abs() > exact.abs()
        z = torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
    return z


def _variant(
    product: Callable[..., torch.Tensor] = _product,
    masked: Callable[..., torch.Tensor] = in_best_groups,
    weighing: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda s, b: s,
    ordering: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda s, chosen: chosen,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Sigmoid in base 2, counts by comparison, and one thing changed."""

    def run(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, *how: Any) -> tuple[torch.Tensor, ...]:
        n_group, topk_group, k, scale = how
        s = 1 / (1 + torch.exp2(product(x, gate_w) * -1.4426950408889634))
        chosen = ordering(s, best(masked(s + bias, n_group, topk_group), k))
        w = weighing(s, s + bias).gather(-1, chosen)
        counts = torch.zeros(len(gate_w), dtype=torch.int32, device=x.device)
        ones = torch.ones_like(chosen.flatten(), dtype=torch.int32)
        counts.index_add_(0, chosen.flatten(), ones)
        return chosen.int().contiguous(), (w * (scale / (w.sum(-1, keepdim=True) + 1e-20))).contiguous(), counts

    return run


def _zero_mask(scores: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    values = in_best_groups(scores, n_group, topk_group)
    return torch.where(values.isinf(), 0.0, values)


def _best_of_group(scores: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    """Groups by their largest score alone."""
    groups = scores.unflatten(-1, (n_group, -1))
    kept = best(groups.amax(-1), topk_group)
    dropped = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, kept, False)
    return groups.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(-2)


WRONG = {
    "dropped groups count as 0": _variant(masked=_zero_mask),
    "groups scored by their largest value": _variant(masked=_best_of_group),
    "no groups": _variant(masked=lambda scores, n_group, topk_group: scores),
    "weights with the bias": _variant(weighing=lambda s, b: b),
    "choices in descending order of s": _variant(
        ordering=lambda s, c: c.gather(-1, s.gather(-1, c).argsort(-1, descending=True))
    ),
    "z rounded to bfloat16": _variant(product=lambda x, w: _product(x, w).bfloat16().float()),
}
SECOND = {
    "sigmoid in base 2": _variant(),
    "sums that are cut off every 16 channels": _variant(product=_truncating),
}
