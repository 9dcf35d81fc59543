"""Mixture-of-experts block of gpt-oss-20b in float32: biased router, 4 of 32 experts, clamped interleaved SwiGLU.

There are T tokens of H channels and E experts with I inner channels, k of them for each token (the model has H = I =
2880, E = 32, k = 4). The experts' weights are stored input-major: row i holds what input channel i contributes.

Inputs, contiguous and row-major:
  x            [T, H]       float32
  router_w     [E, H]       float32
  router_b     [E]          float32
  w_gate_up    [E, H, 2 I]  float32   column 2 i: gate i; column 2 i + 1: up i
  b_gate_up    [E, 2 I]     float32   in the same order
  w_down       [E, I, H]    float32
  b_down       [E, H]       float32
  top_k        int          k, at most E

Output, contiguous and row-major:
  out          [T, H]       float32

For every token t, in float32:
  l = router_w x[t] + router_b;  the k experts of the largest l are chosen
  w = softmax over the k chosen logits
  for each chosen expert e:
    v = x[t] w_gate_up[e] + b_gate_up[e]
    g_i = min(v[2 i], 7);  u_i = min(max(v[2 i + 1], -7), 7)
    a_i = (u_i + 1) * g_i * sigmoid(1.702 * g_i)
    y = a w_down[e] + b_down[e]
  out[t] = sum over the chosen experts of w_e * y_e

Numerics: float32 throughout. A single product of operands rounded to TF32 or bfloat16 is not accurate enough; several
such products that together keep float32's precision are.

Rules:
- The gate is limited from above only. Both limits act before the sigmoid, and a few per cent of the values reach them.
- The number of tokens per expert is drawn with the data; it may be 0 or T.
- On equal logits the lower expert comes first. No choice hangs on float32 rounding: the last chosen and the first
  rejected logit differ by at least 1e-4.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, redraw
from mkb_env.problems.moe.common import best, expected_hits, float32_limit, gaps, per_expert, sum_of_experts

TITLE = "MoE block with clamped interleaved SwiGLU, 4 of 32 experts, fp32"
NUMBER = 51
MODEL = "gpt-oss-20b"
INPUTS = (
    "x",
    "router_w",
    "router_b",
    "w_gate_up",
    "b_gate_up",
    "w_down",
    "b_down",
    "top_k",
)
OUTPUTS = ("out",)
HOST_VISIBLE = ()
MARGIN = 1e-4
ALPHA, LIMIT = 1.702, 7.0
SIZES = {"H": 2880, "I": 2880, "E": 32, "k": 4}
WORKLOADS = {
    "full": SIZES | {"T": 512, "shifts": [[[21], -6.0]]},
    "small": {"T": 8, "H": 32, "I": 32, "E": 8, "k": 4, "shifts": [[[2], 3.0], [[5], -6.0]]},
    "heldout": [
        SIZES | {"T": 33, "shifts": []},
        SIZES | {"T": 129, "shifts": [[[0, 1], 3.0], [list(range(20, 32)), -6.0]]},
        {"T": 21, "H": 45, "I": 27, "E": 9, "k": 2, "shifts": [[[8], 3.0]]},
    ],
}
"""``shifts``: what is added to the router bias of some experts, so that some have many tokens and some none."""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, hidden, inner, experts = (shape[key] for key in ("T", "H", "I", "E"))
    sizes = (
        (tokens, hidden),
        (experts, hidden),
        (experts,),
        (experts, hidden, 2 * inner),
        (experts, 2 * inner),
        (experts, inner, hidden),
        (experts, hidden),
    )
    return (*((size, torch.float32) for size in sizes), shape["k"])


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["H"]), torch.float32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Normal numbers in ``INPUTS``' order; gate and up weights are three times larger than usual, to reach the limits.

    A token's row is drawn again while its choice of experts hangs on less than ``MARGIN``.
    """
    hidden, inner, experts = (shape[key] for key in ("H", "I", "E"))
    router_w = normal(generator, experts, hidden, scale=hidden**-0.5)
    router_b = normal(generator, experts, scale=0.1) + per_expert(experts, shape["shifts"], generator.device)

    def good(x: torch.Tensor) -> torch.Tensor:
        return gaps(x.double() @ router_w.double().T + router_b.double(), shape["k"])[:, -1] >= MARGIN

    return (
        redraw(lambda rows: normal(generator, rows, hidden), good, shape["T"]),
        router_w,
        router_b,
        normal(generator, experts, hidden, 2 * inner, scale=3 * hidden**-0.5),
        normal(generator, experts, 2 * inner, scale=0.1),
        normal(generator, experts, inner, hidden, scale=inner**-0.5),
        normal(generator, experts, hidden, scale=0.1),
        shape["k"],
    )


def route(
    x: torch.Tensor, router_w: torch.Tensor, router_b: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts and their weights, both [T, top_k]."""
    logits = x @ router_w.to(x.dtype).T + router_b.to(x.dtype)
    chosen = best(logits, top_k)
    return chosen, logits.gather(-1, chosen).softmax(dim=-1)


def activation(v: torch.Tensor) -> torch.Tensor:
    """(u + 1) g sigmoid(1.702 g) with the gates g, limited from above, and the ups u, limited on both sides."""
    g, u = v[..., 0::2].clamp(max=LIMIT), v[..., 1::2].clamp(min=-LIMIT, max=LIMIT)
    return (u + 1) * g * (ALPHA * g).sigmoid()


def reference(
    x: torch.Tensor,
    router_w: torch.Tensor,
    router_b: torch.Tensor,
    w_gate_up: torch.Tensor,
    b_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    b_down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The module's formula, expert by expert, in x's dtype."""
    chosen, weights = route(x, router_w, router_b, top_k)

    def mlp(expert: int, rows: torch.Tensor) -> torch.Tensor:
        both, down = w_gate_up[expert].to(x.dtype), w_down[expert].to(x.dtype)
        return activation(rows @ both + b_gate_up[expert]) @ down + b_down[expert]

    return sum_of_experts(x, chosen, weights, len(w_down), mlp)


def anchor(x: torch.Tensor, *others: Any) -> torch.Tensor:
    """The reference in float64, its weights widened expert by expert."""
    return reference(x.double(), *others)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """What float32 products may err by (``float32_limit``), on the scale of a row's largest element."""
    return float32_limit(anchor.abs().amax(dim=-1, keepdim=True), inputs[0].shape[1])


def COST(shape: Shape) -> Cost:
    """Weights of the experts that are hit, router, rows and results once; three products per expert and token."""
    tokens, hidden, inner, experts, k = (shape[key] for key in ("T", "H", "I", "E", "k"))
    weights = expected_hits(experts, tokens, k) * (3 * hidden * inner + 2 * inner + hidden)
    moved = weights + experts * (hidden + 1) + 2 * tokens * hidden
    return Cost(bytes=4 * moved, flops=6 * tokens * k * hidden * inner, unit="3xtf32")
