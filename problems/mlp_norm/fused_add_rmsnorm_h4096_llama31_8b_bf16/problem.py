"""Residual add followed by RMSNorm over a hidden size of 4096 (Llama-3.1-8B). Only the normalised rows are returned.

Inputs, contiguous and row-major:
  hidden_states  [T, 4096]  bfloat16
  residual       [T, 4096]  bfloat16
  weight         [4096]     bfloat16

Output, contiguous and row-major:
  y              [T, 4096]  bfloat16

For every row t, in float32:
  s = float32(hidden_states[t]) + float32(residual[t])
  r = 1 / sqrt(mean(s^2) + 1e-5)
  y[t] = bfloat16(s * r * float32(weight))

Numerics: s stays in float32 (it is not rounded to bfloat16 before the mean or after it), the mean runs over the 4096
columns and is accumulated in float32, the weight is multiplied in float32, and the result is rounded once, to nearest
even. Rows may be all zero after the addition (then y is 0), very large or very small; the 1e-5 matters for the latter.

T is any positive number. The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation

TITLE = "Residual add + RMSNorm, hidden size 4096"
NUMBER = 28
MODEL = "Llama-3.1-8B"
INPUTS = ("hidden_states", "residual", "weight")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
HIDDEN = 4096
EPS = 1e-5
WORKLOADS = {
    "full": {"T": 14509, "cancelling_rows": 3, "large_rows": 2, "small_rows": 2},
    "small": {"T": 5, "cancelling_rows": 1, "small_rows": 1},
    "heldout": [{"T": 1}, {"T": 777, "cancelling_rows": 3, "large_rows": 2, "small_rows": 2}],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    rows = (shape["T"], HIDDEN), torch.bfloat16
    return rows, rows, ((HIDDEN,), torch.bfloat16)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], HIDDEN), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal rows and a weight around 1, in ``INPUTS``' order.

    At random places, ``cancelling_rows`` rows have residual = -hidden_states, ``large_rows`` rows of both tensors are
    scaled by 1e4 and ``small_rows`` rows by 1e-4.
    """
    tokens = shape["T"]
    hidden, residual = (normal(generator, tokens, HIDDEN) for _ in range(2))
    weight = normal(generator, HIDDEN, dtype=torch.bfloat16, scale=0.1, mean=1.0)
    counts = [shape.get(key, 0) for key in ("cancelling_rows", "large_rows", "small_rows")]
    cancelling, large, small = permutation(generator, tokens)[: sum(counts)].split(counts)
    for tensor in (hidden, residual):
        tensor[large] *= 1e4
        tensor[small] *= 1e-4
    residual[cancelling] = -hidden[cancelling]
    return hidden.bfloat16(), residual.bfloat16(), weight


def reference(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    s = hidden_states.to(wide) + residual.to(wide)
    r = torch.rsqrt(s.square().mean(dim=-1, keepdim=True) + EPS)
    return (s * r * weight.to(wide)).to(hidden_states.dtype)


def COST(shape: Shape) -> Cost:
    """Both inputs and the output cross memory once; five operations per element."""
    tokens = shape["T"]
    return Cost(bytes=2 * HIDDEN * (3 * tokens + 1), flops=5 * HIDDEN * tokens, unit="fp32")
