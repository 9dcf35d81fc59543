"""Mixture-of-experts block of Qwen3-Next-80B-A3B: 10 of 512 small experts and a shared expert with a gate per token.

There are T tokens of H channels, E routed experts with I inner channels, k of them for each token, and a shared expert
with Is inner channels (the model has H = 2048, E = 512, k = 10, I = Is = 512).

Inputs, contiguous and row-major:
  x               [T, H]       bfloat16
  gate_w          [E, H]       bfloat16
  w_gate_up       [E, 2 I, H]  bfloat16   rows 0 to I - 1: gate; rows I to 2 I - 1: up
  w_down          [E, H, I]    bfloat16
  shared_gate_up  [2 Is, H]    bfloat16   rows 0 to Is - 1: gate; rows Is to 2 Is - 1: up
  shared_down     [H, Is]      bfloat16
  shared_gate     [1, H]       bfloat16
  top_k           int          k, at most E

Output, contiguous and row-major:
  out             [T, H]       bfloat16

An MLP with weights (Wgu, Wd), each product accumulated in float32:
  [g, u] = bfloat16(Wgu x[t])
  a = bfloat16(silu(float32(g)) * float32(u)),  silu(z) = z / (1 + exp(-z))
  MLP(x[t]) = bfloat16(Wd a)

For every token t, in float32:
  l = gate_w x[t]                              not rounded; the k experts of the largest l are chosen
  w = softmax over the k chosen logits
  c = sigmoid(shared_gate x[t])                a number per token, not rounded
  out[t] = bfloat16( sum_j w_j * MLP of chosen expert j + c * MLP of the shared expert )

Numerics: router logits and c are float32 results of bfloat16 operands. Results of the MLPs are rounded to bfloat16 as
written; keeping them in float32 is within the tolerance. The final sum is accumulated in float32 and rounded once, to
nearest even.

Rules:
- The number of tokens per expert is drawn with the data; many experts have few tokens or none.
- No choice hangs on a tie or on float32 rounding: the last chosen and the first rejected logit differ by at least 1e-3
  (rounded to bfloat16 they may be equal).
- Logits of some tokens are several hundred, so that their exponentials exceed float32.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import permutation, redraw
from mkb_env.problems.moe.common import best, expected_hits, gaps, large_normal, per_expert, routed_swiglu, swiglu

TITLE = "MoE block, 10 of 512 experts, with a gated shared expert"
NUMBER = 48
MODEL = "Qwen3-Next-80B-A3B"
INPUTS = (
    "x",
    "gate_w",
    "w_gate_up",
    "w_down",
    "shared_gate_up",
    "shared_down",
    "shared_gate",
    "top_k",
)
OUTPUTS = ("out",)
HOST_VISIBLE = ()
MARGIN = 1e-3
LOUD = 128.0
SIZES = {"H": 2048, "I": 512, "E": 512, "k": 10, "Is": 512}
WORKLOADS = {
    "full": SIZES | {"T": 1024, "gains": [[[300, 301], 0.0]], "loud": 2},
    "small": {"T": 8, "H": 64, "I": 16, "E": 32, "k": 10, "Is": 16, "gains": [[[3], 3.0], [[9, 30], 0.0]], "loud": 2},
    "heldout": [
        SIZES | {"T": 1, "gains": []},
        SIZES | {"T": 301, "gains": [[list(range(16)), 3.0]], "loud": 2},
        {"T": 23, "H": 56, "I": 24, "E": 19, "k": 4, "Is": 40, "gains": [[[0], 3.0]], "loud": 1},
    ],
}
"""``gains``: factors of some experts' router rows, so that some have many tokens and some none.
``loud``: so many tokens are multiplied by ``LOUD``.
"""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, hidden, inner, experts, shared = (shape[key] for key in ("T", "H", "I", "E", "Is"))
    sizes = (
        (tokens, hidden),
        (experts, hidden),
        (experts, 2 * inner, hidden),
        (experts, hidden, inner),
        (2 * shared, hidden),
        (hidden, shared),
        (1, hidden),
    )
    return (*((size, torch.bfloat16) for size in sizes), shape["k"])


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["H"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Normal rows and weights of variance 1 / fan-in, in ``INPUTS``' order.

    A token's row is drawn again while its choice of experts hangs on less than ``MARGIN``.
    """
    hidden, inner, experts, shared = (shape[key] for key in ("H", "I", "E", "Is"))
    gate_w = large_normal(generator, experts, hidden, scale=hidden**-0.5)
    gate_w *= per_expert(experts, shape["gains"], generator.device, default=1.0).unsqueeze(1)

    def good(x: torch.Tensor) -> torch.Tensor:
        return gaps(x.double() @ gate_w.double().T, shape["k"])[:, -1] >= MARGIN

    x = redraw(lambda rows: large_normal(generator, rows, hidden, scale=1.0), good, shape["T"])
    # Afterwards, so that margins grow with the logits as their rounding does.
    x[permutation(generator, shape["T"])[: shape.get("loud", 0)]] *= LOUD
    return (
        x,
        gate_w,
        large_normal(generator, experts, 2 * inner, hidden, scale=hidden**-0.5),
        large_normal(generator, experts, hidden, inner, scale=inner**-0.5),
        large_normal(generator, 2 * shared, hidden, scale=hidden**-0.5),
        large_normal(generator, hidden, shared, scale=shared**-0.5),
        large_normal(generator, 1, hidden, scale=hidden**-0.5),
        shape["k"],
    )


def route(x: torch.Tensor, gate_w: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts and their weights, both [T, top_k], in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ gate_w.to(wide).T
    chosen = best(logits, top_k)
    return chosen, logits.gather(-1, chosen).softmax(dim=-1)


def reference(
    x: torch.Tensor,
    gate_w: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    shared_gate_up: torch.Tensor,
    shared_down: torch.Tensor,
    shared_gate: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The module's formula; with float64 rows everything is computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    chosen, weights = route(x, gate_w, top_k)
    routed = (routed_swiglu(x, chosen, w_gate_up, w_down) * weights.unsqueeze(-1)).sum(dim=1)
    c = (x.to(wide) @ shared_gate.to(wide).T).sigmoid()
    return (routed + c * swiglu(x, shared_gate_up, shared_down)).to(x.dtype)


def anchor(x: torch.Tensor, *others: Any) -> torch.Tensor:
    """The reference in float64, its weights widened a few experts at a time."""
    return reference(x.double(), *others)


def COST(shape: Shape) -> Cost:
    """Weights of the experts that are hit, router, rows and results once; three products per expert and token."""
    tokens, hidden, inner, experts, shared, k = (shape[key] for key in ("T", "H", "I", "E", "Is", "k"))
    weights = 6 * hidden * (expected_hits(experts, tokens, k) * inner + shared)
    router = 2 * (experts + 1) * hidden
    flops = 6 * tokens * hidden * (k * inner + shared)
    return Cost(bytes=weights + router + 4 * tokens * hidden, flops=flops, unit="bf16")
