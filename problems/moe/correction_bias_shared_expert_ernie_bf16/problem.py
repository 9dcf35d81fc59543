"""Mixture-of-experts block of ERNIE-4.5-21B-A3B: biased choice of experts, routed SwiGLU experts, one shared expert.

There are T tokens of H channels, E routed experts with I inner channels, k of them for each token, and a shared expert
with Is inner channels (the model has H = 2560, E = 64, k = 6, I = 1536, Is = 3072).

Inputs, contiguous and row-major:
  x                [T, H]       bfloat16
  gate_w           [E, H]       float32
  correction_bias  [E]          float32    takes part in the choice of experts only
  w_gate_up        [E, 2 I, H]  bfloat16   rows 0 to I - 1: gate; rows I to 2 I - 1: up
  w_down           [E, H, I]    bfloat16
  shared_gate_up   [2 Is, H]    bfloat16   rows 0 to Is - 1: gate; rows Is to 2 Is - 1: up
  shared_down      [H, Is]      bfloat16
  top_k            int          k, at most E

Output, contiguous and row-major:
  out              [T, H]       bfloat16

An MLP with weights (Wgu, Wd), each product accumulated in float32:
  [g, u] = bfloat16(Wgu x[t])
  a = bfloat16(silu(float32(g)) * float32(u)),  silu(z) = z / (1 + exp(-z))
  MLP(x[t]) = bfloat16(Wd a)

For every token t:
  p = softmax(gate_w float32(x[t]))           over all E experts, in float32
  the k experts of the largest p + correction_bias are chosen
  w_j = p_j / max(sum of p over the chosen experts, 1e-12)    without the bias, in float32, not rounded
  out[t] = bfloat16( sum_j w_j * MLP of chosen expert j + MLP of the shared expert )    summed in float32

Numerics: the router works in float32 throughout (its weights are float32). Results of the MLPs are rounded to bfloat16
as written; keeping them in float32 is within the tolerance. The final sum is rounded once, to nearest even.

Rules:
- The number of tokens per expert is drawn with the data; it may be 0 or T.
- No choice hangs on a tie or on float32 rounding: the last chosen and the first rejected expert differ by at least
  2e-5 in p + correction_bias. Logits rounded to bfloat16 may choose others.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, redraw, uniform
from mkb_env.problems.moe.common import best, expected_hits, gaps, large_normal, per_expert, routed_swiglu, swiglu

TITLE = "MoE block with selection bias, 6 of 64 experts and a shared expert"
NUMBER = 47
MODEL = "ERNIE-4.5-21B-A3B"
INPUTS = (
    "x",
    "gate_w",
    "correction_bias",
    "w_gate_up",
    "w_down",
    "shared_gate_up",
    "shared_down",
    "top_k",
)
OUTPUTS = ("out",)
HOST_VISIBLE = ()
MARGIN = 2e-5
FLOOR = 1e-12
SIZES = {"H": 2560, "I": 1536, "E": 64, "k": 6, "Is": 3072, "bias": 0.01}
TINY = {"bias": 0.02, "twins": 0.002}
WORKLOADS = {
    "full": SIZES | {"T": 2048, "shifts": [[[11], -1.0]]},
    "small": TINY | {"T": 24, "H": 64, "I": 16, "E": 32, "k": 5, "Is": 32, "shifts": [[[6, 7], -1.0]]},
    "heldout": [
        SIZES | {"T": 37, "shifts": []},
        SIZES | {"T": 513, "shifts": [[[5, 17, 40], 1.0]]},
        TINY | {"T": 21, "H": 40, "I": 24, "E": 10, "k": 3, "Is": 56, "shifts": [[[4, 5], 1.0]]},
    ],
}
"""``shifts``: what is added to the bias of some experts, so that all tokens choose them or none does.
``twins``: experts 2 i and 2 i + 1 have one bias and logits that differ by about so much; of an odd k one is left out.
"""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, hidden, inner, experts, shared = (shape[key] for key in ("T", "H", "I", "E", "Is"))
    return (
        ((tokens, hidden), torch.bfloat16),
        ((experts, hidden), torch.float32),
        ((experts,), torch.float32),
        ((experts, 2 * inner, hidden), torch.bfloat16),
        ((experts, hidden, inner), torch.bfloat16),
        ((2 * shared, hidden), torch.bfloat16),
        ((hidden, shared), torch.bfloat16),
        shape["k"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["H"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Normal rows, weights of variance 1 / fan-in and a small uniform bias, in ``INPUTS``' order.

    A token's row is drawn again while its choice of experts hangs on less than ``MARGIN``.
    """
    hidden, inner, experts, shared = (shape[key] for key in ("H", "I", "E", "Is"))
    gate_w = normal(generator, experts, hidden, scale=hidden**-0.5)
    bias = uniform(generator, experts, low=-shape["bias"], high=shape["bias"])
    if "twins" in shape:
        gate_w[1::2] = gate_w[::2] + shape["twins"] * gate_w[1::2]
        bias[1::2] = bias[::2]
    bias += per_expert(experts, shape["shifts"], generator.device)

    def good(x: torch.Tensor) -> torch.Tensor:
        biased = (x.double() @ gate_w.double().T).softmax(dim=-1) + bias.double()
        return gaps(biased, shape["k"])[:, -1] >= MARGIN

    return (
        redraw(lambda rows: large_normal(generator, rows, hidden, scale=1.0), good, shape["T"]),
        gate_w,
        bias,
        large_normal(generator, experts, 2 * inner, hidden, scale=hidden**-0.5),
        large_normal(generator, experts, hidden, inner, scale=inner**-0.5),
        large_normal(generator, 2 * shared, hidden, scale=hidden**-0.5),
        large_normal(generator, hidden, shared, scale=shared**-0.5),
        shape["k"],
    )


def route(
    x: torch.Tensor, gate_w: torch.Tensor, correction_bias: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts and their weights, both [T, top_k], in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    p = (x.to(wide) @ gate_w.to(wide).T).softmax(dim=-1)
    chosen = best(p + correction_bias.to(wide), top_k)
    weights = p.gather(-1, chosen)
    return chosen, weights / weights.sum(dim=-1, keepdim=True).clamp(min=FLOOR)


def reference(
    x: torch.Tensor,
    gate_w: torch.Tensor,
    correction_bias: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    shared_gate_up: torch.Tensor,
    shared_down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The module's formula; with float64 rows everything is computed in float64."""
    chosen, weights = route(x, gate_w, correction_bias, top_k)
    routed = (routed_swiglu(x, chosen, w_gate_up, w_down) * weights.unsqueeze(-1)).sum(dim=1)
    return (routed + swiglu(x, shared_gate_up, shared_down)).to(x.dtype)


def anchor(x: torch.Tensor, *others: Any) -> torch.Tensor:
    """The reference in float64, its weights widened a few experts at a time."""
    return reference(x.double(), *others)


def COST(shape: Shape) -> Cost:
    """Weights of the experts that are hit, router, rows and results once; three products per expert and token."""
    tokens, hidden, inner, experts, shared, k = (shape[key] for key in ("T", "H", "I", "E", "Is", "k"))
    weights = 6 * hidden * (expected_hits(experts, tokens, k) * inner + shared)
    router = 4 * experts * (hidden + 1)
    flops = 6 * tokens * hidden * (k * inner + shared)
    return Cost(bytes=weights + router + 4 * tokens * hidden, flops=flops, unit="bf16")
