"""Gradients of a SwiGLU MLP, with its forward pass recomputed (training of Hermes-3-Llama-3.1-8B).

There are T tokens, width D, hidden width F. The MLP is y = (silu(x w_gate^T) * (x w_up^T)) w_down^T, without biases.

Inputs, contiguous and row-major:
  grad_out     [T, D]  bfloat16  gradient of y
  x            [T, D]  bfloat16
  w_gate       [F, D]  bfloat16  [out, in]
  w_up         [F, D]  bfloat16  [out, in]
  w_down       [D, F]  bfloat16  [out, in]

Outputs, a tuple in this order, contiguous and row-major:
  grad_x       [T, D]  bfloat16
  grad_w_gate  [F, D]  bfloat16
  grad_w_up    [F, D]  bfloat16
  grad_w_down  [D, F]  bfloat16

Where bf16 rounds to bfloat16 and everything inside is float32:
  g = bf16(x @ w_gate^T)
  u = bf16(x @ w_up^T)
  s = sigmoid(g)                                    (not rounded)
  a = bf16(g * s)
  h = bf16(a * u)
  dh = bf16(grad_out @ w_down)
  du = bf16(dh * a)
  da = bf16(dh * u)
  dg = bf16(da * s * (1 + g * (1 - s)))
  grad_w_down = bf16(grad_out^T @ h)
  grad_w_gate = bf16(dg^T @ x)
  grad_w_up = bf16(du^T @ x)
  grad_x = bf16(bf16(dg @ w_gate) + bf16(du @ w_up))

Numerics: products have bfloat16 operands and float32 accumulation, the sums over tokens included. Fewer roundings than
written are within the tolerance: elementwise results in float32 up to the next product, one accumulator for grad_x.

Rules:
- The weights' gradients sum over all T tokens, whatever T is.
- D and F are multiples of 8; T is any positive number.
- The inputs are not changed; the outputs are new tensors.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal

TITLE = "SwiGLU MLP, backward with recomputation"
NUMBER = 34
MODEL = "Hermes-3-Llama-3.1-8B"
INPUTS = ("grad_out", "x", "w_gate", "w_up", "w_down")
OUTPUTS = ("grad_x", "grad_w_gate", "grad_w_up", "grad_w_down")
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"T": 2048, "D": 4096, "F": 14336},
    "small": {"T": 8, "D": 64, "F": 128},
    "heldout": [
        {"T": 300, "D": 4096, "F": 14336},
        {"T": 17, "D": 2048, "F": 8192},
        {"T": 5, "D": 72, "F": 104},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, width, hidden = shape["T"], shape["D"], shape["F"]
    sizes = ((tokens, width), (tokens, width), (hidden, width), (hidden, width), (width, hidden))
    return tuple((size, torch.bfloat16) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    tokens, width, hidden = shape["T"], shape["D"], shape["F"]
    sizes = ((tokens, width), (hidden, width), (hidden, width), (width, hidden))
    return tuple((size, torch.bfloat16) for size in sizes)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal tokens and gradients, weights that keep their scale, in ``INPUTS``' order."""
    tokens, width, hidden, bf16 = shape["T"], shape["D"], shape["F"], torch.bfloat16
    grad_out, x = (normal(generator, tokens, width, dtype=bf16) for _ in range(2))
    w_gate, w_up = (normal(generator, hidden, width, dtype=bf16, scale=width**-0.5) for _ in range(2))
    w_down = normal(generator, width, hidden, dtype=bf16, scale=hidden**-0.5)
    return grad_out, x, w_gate, w_up, w_down


def reference(
    grad_out: torch.Tensor, x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The module's formulas: torch's operators round their bfloat16 results once, and compute float64 in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    g, u = linear(x, w_gate), linear(x, w_up)
    a = silu(g)
    dh = grad_out @ w_down
    grad_w_down = grad_out.T @ (a * u)
    du = dh * a
    da = (dh * u).to(wide)
    s = torch.sigmoid(g.to(wide))
    dg = (da * s * (1 + g.to(wide) * (1 - s))).to(x.dtype)
    return dg @ w_gate + du @ w_up, dg.T @ x, du.T @ x, grad_w_down


def COST(shape: Shape) -> Cost:
    """Inputs and outputs cross memory once; eight products of T D F multiply-adds."""
    tokens, width, hidden = shape["T"], shape["D"], shape["F"]
    elements = 3 * tokens * width + 6 * width * hidden
    return Cost(bytes=2 * elements, flops=16 * tokens * width * hidden, unit="bf16")
