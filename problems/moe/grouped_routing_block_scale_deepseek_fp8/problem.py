"""Mixture of experts on one expert-parallel rank of DeepSeek-V3: grouped sigmoid routing, FP8 block-scaled SwiGLU.

There are T tokens of H channels, Eg experts in all, of which this rank holds El: local expert e is the global expert
local_expert_offset + e. Each expert has I inner channels. H and I are multiples of 128.

Inputs, contiguous and row-major:
  routing_logits         [T, Eg]            float32
  routing_bias           [Eg]               bfloat16       takes part in the choice of experts only
  hidden_states          [T, H]             float8_e4m3fn
  hidden_states_scale    [H / 128, T]       float32        of 128 channels of a token; the token is the last axis
  gemm1_weights          [El, 2 I, H]       float8_e4m3fn  rows 0 to I - 1: up; rows I to 2 I - 1: gate
  gemm1_weights_scale    [El, 2 I / 128, H / 128]  float32  of a 128 x 128 tile
  gemm2_weights          [El, H, I]         float8_e4m3fn
  gemm2_weights_scale    [El, H / 128, I / 128]    float32  of a 128 x 128 tile
  local_expert_offset    int
  routed_scaling_factor  float
  n_group                int                divides Eg; each group has Eg / n_group consecutive experts, at least two
  topk_group             int
  top_k                  int                at most the experts of topk_group groups

Output, contiguous and row-major:
  out                    [T, H]             bfloat16

For every token t, in float32:
  s = sigmoid(routing_logits[t]),  b = s + routing_bias
  score of a group = sum of the two largest b in it; keep the topk_group groups of the largest score
  P = the top_k experts of the largest b among the experts of the kept groups (all others count as -infinity)
  w_e = s_e / (sum over P of s + 1e-20) * routed_scaling_factor    for e in P, local or not
  x = float32(hidden_states[t]) times its scales: channel c has hidden_states_scale[c // 128, t]
  W1, W2 = float32(gemm1_weights), float32(gemm2_weights) of local expert e times their scales: element (r, c) has the
           scale of tile (r // 128, c // 128)
  p = W1 x;  h = silu(p[I : 2 I]) * p[0 : I];  y_e = W2 h;  silu(z) = z / (1 + exp(-z))
  out[t] = bfloat16(sum over the experts e in P that this rank holds of w_e * y_e)

Numerics: everything is computed in float32 and rounded once, to nearest even, at the end. h is not quantised; an h
rounded to bfloat16 is within the tolerance, an h rounded to 8 bits is not.

Rules:
- The sum in w_e runs over all of P, also over experts that other ranks hold.
- A token without an expert on this rank has output 0. A local expert may have no token, or all of them.
- On equal scores the lower group or expert comes first. No choice hangs on float32 rounding: the last chosen and the
  first rejected differ by at least 1e-4.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, redraw, uniform
from mkb_env.problems.moe.common import (
    best,
    expected_hits,
    gaps,
    group_scores,
    in_best_groups,
    per_expert,
    sum_of_experts,
)

TITLE = "Expert-parallel MoE with grouped routing, FP8 weights scaled by block"
NUMBER = 44
MODEL = "DeepSeek-V3"
INPUTS = (
    "routing_logits",
    "routing_bias",
    "hidden_states",
    "hidden_states_scale",
    "gemm1_weights",
    "gemm1_weights_scale",
    "gemm2_weights",
    "gemm2_weights_scale",
    "local_expert_offset",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "top_k",
)
OUTPUTS = ("out",)
HOST_VISIBLE = ()
BLOCK = 128
MARGIN = 1e-4
FP8 = torch.float8_e4m3fn
SIZES = {"Eg": 256, "El": 32, "H": 7168, "I": 2048, "n_group": 8, "topk_group": 4, "k": 8, "scaling": 2.5}
TINY = SIZES | {"Eg": 16, "El": 4, "H": 256, "I": 128, "n_group": 4, "topk_group": 2, "k": 4}
WORKLOADS = {
    "full": SIZES | {"T": 4096, "offset": 32, "shifts": [[[45], -4.0]]},
    "small": TINY | {"T": 12, "offset": 4, "shifts": [[[6], -4.0]]},
    "heldout": [
        SIZES | {"T": 1, "offset": 224, "shifts": []},
        SIZES | {"T": 1537, "offset": 0, "shifts": [[[3, 4], 2.0], [[10, 11, 12, 13, 14, 15], -4.0]]},
        TINY | {"T": 19, "Eg": 12, "El": 3, "H": 128, "k": 3, "offset": 9, "scaling": 1.5, "shifts": []},
    ],
}
"""``shifts``: what is added to the logits of some experts, so that some get many rows and some none."""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, experts, local, hidden, inner = (shape[key] for key in ("T", "Eg", "El", "H", "I"))
    return (
        ((tokens, experts), torch.float32),
        ((experts,), torch.bfloat16),
        ((tokens, hidden), FP8),
        ((hidden // BLOCK, tokens), torch.float32),
        ((local, 2 * inner, hidden), FP8),
        ((local, 2 * inner // BLOCK, hidden // BLOCK), torch.float32),
        ((local, hidden, inner), FP8),
        ((local, hidden // BLOCK, inner // BLOCK), torch.float32),
        *(shape[key] for key in ("offset", "scaling", "n_group", "topk_group", "k")),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["H"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal 8-bit values with scales around 1 and fan-in^-1/2, and bfloat16 logits, in ``INPUTS``' order.

    A token's logits are drawn again while a choice hangs on less than ``MARGIN``.
    """
    tokens, experts, local, hidden, inner = (shape[key] for key in ("T", "Eg", "El", "H", "I"))
    raised = uniform(generator, experts) < 0.4
    bias = (4.9375 + 0.03125 * raised).bfloat16()
    shifts = per_expert(experts, shape["shifts"], generator.device)

    def draw(rows: int) -> torch.Tensor:
        return (normal(generator, rows, experts, scale=0.656, mean=-1.67) + shifts).bfloat16().float()

    def good(logits: torch.Tensor) -> torch.Tensor:
        scores = logits.double().sigmoid() + bias.double()
        groups = gaps(group_scores(scores, shape["n_group"]), shape["topk_group"])[:, -1]
        choice = gaps(in_best_groups(scores, shape["n_group"], shape["topk_group"]), shape["k"])[:, -1]
        return torch.minimum(groups, choice) >= MARGIN

    def scales(*sizes: int, fan_in: int = 1) -> torch.Tensor:
        return uniform(generator, *sizes, low=0.5, high=1.5) * fan_in**-0.5

    return (
        redraw(draw, good, tokens),
        bias,
        _float8(generator, tokens, hidden),
        scales(hidden // BLOCK, tokens),
        _float8(generator, local, 2 * inner, hidden),
        scales(local, 2 * inner // BLOCK, hidden // BLOCK, fan_in=hidden),
        _float8(generator, local, hidden, inner),
        scales(local, hidden // BLOCK, inner // BLOCK, fan_in=inner),
        *(shape[key] for key in ("offset", "scaling", "n_group", "topk_group", "k")),
    )


def _float8(generator: torch.Generator, *sizes: int) -> torch.Tensor:
    """N(0, 1) rounded to 8 bits, in pieces of at most half a gigabyte."""
    drawn = torch.empty(sizes, dtype=FP8, device=generator.device)
    for piece in drawn.view(-1).split(1 << 28):
        piece.copy_(torch.randn(piece.shape, dtype=torch.bfloat16, generator=generator, device=generator.device))
    return drawn


def route(
    logits: torch.Tensor, bias: torch.Tensor, scaling: float, n_group: int, topk_group: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts' global ids and their weights, both [T, top_k]."""
    scores = logits.sigmoid()
    chosen = best(in_best_groups(scores + bias.to(scores.dtype), n_group, topk_group), top_k)
    weights = scores.gather(-1, chosen)
    return chosen, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scaling


def widen_hidden(values: torch.Tensor, scales: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Tokens [T, H] times their scales [H / 128, T]."""
    return (values.to(wide).unflatten(1, (-1, BLOCK)) * scales.to(wide).T.unsqueeze(-1)).flatten(1)


def widen_weight(values: torch.Tensor, scales: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """A weight [R, C] times the scales [R / 128, C / 128] of its tiles."""
    tiles = values.to(wide).view(-1, BLOCK, values.shape[1] // BLOCK, BLOCK)
    return (tiles * scales.to(wide)[:, None, :, None]).view(values.shape)


def reference(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
    n_group: int,
    topk_group: int,
    top_k: int,
) -> torch.Tensor:
    """The module's formula, expert by expert; with float64 logits everything is computed in float64."""
    wide = routing_logits.dtype
    chosen, weights = route(routing_logits, routing_bias, routed_scaling_factor, n_group, topk_group, top_k)

    def mlp(expert: int, x: torch.Tensor) -> torch.Tensor:
        up, gate = (x @ widen_weight(gemm1_weights[expert], gemm1_weights_scale[expert], wide).T).chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * up
        return h @ widen_weight(gemm2_weights[expert], gemm2_weights_scale[expert], wide).T

    x = widen_hidden(hidden_states, hidden_states_scale, wide)
    total = sum_of_experts(x, chosen - local_expert_offset, weights, len(gemm1_weights), mlp)
    return total if wide is torch.float64 else total.bfloat16()


def anchor(routing_logits: torch.Tensor, *others: Any) -> torch.Tensor:
    """The reference in float64, its weights widened expert by expert."""
    return reference(routing_logits.double(), *others)


def COST(shape: Shape) -> Cost:
    """Weights of the experts that are hit, tokens and routing once; three products for the expected local rows."""
    tokens, experts, local, hidden, inner = (shape[key] for key in ("T", "Eg", "El", "H", "I"))
    rows = math.ceil(tokens * shape["k"] * local / experts)
    hit = max(1, expected_hits(experts, tokens, shape["k"]) * local // experts)
    weights = hit * 3 * hidden * inner
    routing = 4 * tokens * experts + 2 * experts
    moved = weights + weights // BLOCK**2 * 4 + tokens * hidden + 4 * tokens * hidden // BLOCK + routing
    return Cost(bytes=moved + 2 * tokens * hidden, flops=6 * rows * hidden * inner, unit="fp8")
