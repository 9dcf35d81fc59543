"""Backward of the grouped SwiGLU experts on one expert-parallel rank of MiMo-V2-Flash, with weight gradients, float32.

There are N rows of H channels, grouped by El local experts with I inner channels each (the model has
H = 4096, I = 2048). The forward pass was, for every row n of expert e: G = w_gate[e] x[n]; U = w_up[e] x[n];
h = silu(G) * U; y = w_down[e] h; out[n] = row_weight[n] * y. Nothing of it was saved.

Inputs, contiguous and row-major:
  x                [N, H]      float32
  expert_offsets   [El + 1]    int32     rows expert_offsets[e] to expert_offsets[e + 1] - 1 belong to expert e;
                                         0 = expert_offsets[0] <= expert_offsets[1] <= ... <= expert_offsets[El] = N
  row_weight       [N]         float32   r, the weight that the router gave the row
  w_gate           [El, I, H]  float32
  w_up             [El, I, H]  float32
  w_down           [El, H, I]  float32
  grad_out         [N, H]      float32

Outputs, a tuple in this order, contiguous and row-major:
  grad_x           [N, H]      float32
  grad_row_weight  [N]         float32
  grad_w_gate      [El, I, H]  float32
  grad_w_up        [El, I, H]  float32
  grad_w_down      [El, H, I]  float32

They are the derivatives of sum(out * grad_out), in float32. For every row n of expert e, with r = row_weight[n] and all
vectors over the I inner channels:
  s = sigmoid(G);  h = G * s * U;  t = w_down[e]ᵀ grad_out[n]
  grad_row_weight[n] = sum(h * t)
  dh = r * t;  dU = dh * G * s;  dG = dh * U * (s + G * s * (1 - s))
  grad_x[n] = w_gate[e]ᵀ dG + w_up[e]ᵀ dU
For every expert e, summed over its rows n:
  grad_w_gate[e] = sum of dG x[n]ᵀ;  grad_w_up[e] = sum of dU x[n]ᵀ;  grad_w_down[e] = sum of r grad_out[n] hᵀ

Numerics: float32 throughout. A single product of operands rounded to TF32 or bfloat16 is not accurate enough; several
such products that together keep float32's precision are.

Rules:
- An expert may have no rows: its weight gradients are 0 and must be written.
- The values of expert_offsets are not visible to host code.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, offsets, uniform
from mkb_env.problems.moe.common import float32_limit

TITLE = "Backward of grouped SwiGLU experts with weight gradients, fp32"
NUMBER = 50
MODEL = "MiMo-V2-Flash"
INPUTS = ("x", "expert_offsets", "row_weight", "w_gate", "w_up", "w_down", "grad_out")
OUTPUTS = ("grad_x", "grad_row_weight", "grad_w_gate", "grad_w_up", "grad_w_down")
HOST_VISIBLE = ()
SIZES = {"H": 4096, "I": 2048}
WORKLOADS = {
    "full": SIZES | {"rows": [252, 301, 0, 247, 318, 263, 378, 289]},
    "small": {"H": 32, "I": 16, "rows": [5, 0, 7]},
    "heldout": [
        SIZES | {"rows": [0, 1, 7, 129, 130, 510, 0, 0]},
        SIZES | {"rows": [9, 0]},
        {"H": 72, "I": 40, "rows": [0, 19, 1, 13]},
    ],
}
"""``rows``: how many rows each local expert has."""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    rows, local, hidden, inner = sum(shape["rows"]), len(shape["rows"]), shape["H"], shape["I"]
    sizes = ((rows,), (local, inner, hidden), (local, inner, hidden), (local, hidden, inner), (rows, hidden))
    return (
        ((rows, hidden), torch.float32),
        ((local + 1,), torch.int32),
        *((size, torch.float32) for size in sizes),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    x, _, row_weight, w_gate, w_up, w_down, _ = input_specs(shape)
    return x, row_weight, w_gate, w_up, w_down


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal rows and gradients, row weights in [0.05, 0.3), weights of variance 1 / fan-in."""
    rows, local, hidden, inner = sum(shape["rows"]), len(shape["rows"]), shape["H"], shape["I"]
    return (
        normal(generator, rows, hidden),
        torch.tensor(offsets(shape["rows"]), dtype=torch.int32, device=generator.device),
        uniform(generator, rows, low=0.05, high=0.3),
        normal(generator, local, inner, hidden, scale=hidden**-0.5),
        normal(generator, local, inner, hidden, scale=hidden**-0.5),
        normal(generator, local, hidden, inner, scale=inner**-0.5),
        normal(generator, rows, hidden),
    )


def reference(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_weight: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    grad_out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The module's formula, expert by expert, in x's dtype."""
    grad_x, grad_r = torch.empty_like(x), torch.empty_like(x[:, 0])
    grads = [torch.zeros(w.shape, dtype=x.dtype, device=x.device) for w in (w_gate, w_up, w_down)]
    for e, (begin, end) in enumerate(pairwise(expert_offsets.tolist())):
        if begin == end:
            continue
        rows, r, given = x[begin:end], row_weight[begin:end, None], grad_out[begin:end]
        gate, up, down = (w[e].to(x.dtype) for w in (w_gate, w_up, w_down))
        g, u, t = rows @ gate.T, rows @ up.T, given @ down
        s = g.sigmoid()
        h, dh = g * s * u, r * t
        d_up, d_gate = dh * g * s, dh * u * (s + g * s * (1 - s))
        grad_x[begin:end] = d_gate @ gate + d_up @ up
        grad_r[begin:end] = (h * t).sum(dim=-1)
        for grad, left, right in zip(grads, (d_gate, d_up, r * given), (rows, rows, h), strict=True):
            grad[e] = left.T @ right
    return grad_x, grad_r, *grads


def anchor(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The reference in float64, the weights widened expert by expert."""
    offsets_, row_weight, w_gate, w_up, w_down, grad_out = others
    return reference(x.double(), offsets_, row_weight.double(), w_gate, w_up, w_down, grad_out.double())


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """What float32 products may err by (``float32_limit``), on the scale of a row, an expert's gradient, or all rows.

    A single row of a weight gradient is no scale: an expert with one row has dG near 0 in some channels, by
    cancellation in t or in the derivative of silu, and whole rows of its gradients are a rounding error away from 0.
    """
    axes = {"grad_x": (-1,), "grad_row_weight": (0,)}.get(name, (-2, -1))
    return float32_limit(anchor.abs().amax(dim=axes, keepdim=True), inputs[0].shape[1])


def COST(shape: Shape) -> Cost:
    """Rows and weights of experts with rows once, all gradients once; eight products, three of them for G, U and t."""
    rows, local, hidden, inner = sum(shape["rows"]), len(shape["rows"]), shape["H"], shape["I"]
    hit = sum(count > 0 for count in shape["rows"])
    moved = 3 * (local + hit) * hidden * inner + 3 * rows * hidden + 2 * rows
    return Cost(bytes=4 * (moved + local + 1), flops=16 * rows * hidden * inner, unit="3xtf32")
