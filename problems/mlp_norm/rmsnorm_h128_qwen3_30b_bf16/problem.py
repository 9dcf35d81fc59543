"""RMSNorm over rows of 128 elements: the flattened query and key heads of Qwen3-30B-A3B.

Inputs, contiguous and row-major:
  hidden_states  [R, 128]  bfloat16
  weight         [128]     bfloat16

Output, contiguous and row-major:
  y              [R, 128]  bfloat16

For every row, in float32:
  x = float32(hidden_states[row])
  y[row] = bfloat16(x / sqrt(mean(x^2) + 1e-6) * float32(weight))

Numerics: the mean runs over the 128 columns and is accumulated in float32; the weight is multiplied in float32, and the
result is rounded once, to nearest even (the normalised row is not rounded before the weight). Rows may be all zero
(then y is 0), very large or very small; the 1e-6 matters for the latter.

R is any positive number. The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation

TITLE = "RMSNorm over rows of 128"
NUMBER = 36
MODEL = "Qwen3-30B-A3B"
INPUTS = ("hidden_states", "weight")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
HEAD_DIM = 128
EPS = 1e-6
WORKLOADS = {
    "full": {"R": 520128, "zero_rows": 3, "large_rows": 2, "small_rows": 2},
    "small": {"R": 9, "zero_rows": 1, "small_rows": 1},
    "heldout": [{"R": 1}, {"R": 4099, "zero_rows": 3, "large_rows": 2, "small_rows": 2}],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    return ((shape["R"], HEAD_DIM), torch.bfloat16), ((HEAD_DIM,), torch.bfloat16)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["R"], HEAD_DIM), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal rows and a weight around 1, in ``INPUTS``' order.

    At random places, ``zero_rows`` rows are 0, ``large_rows`` rows are scaled by 3e4 and ``small_rows`` rows by 1e-4.
    """
    rows = shape["R"]
    hidden = normal(generator, rows, HEAD_DIM)
    weight = normal(generator, HEAD_DIM, dtype=torch.bfloat16, scale=0.1, mean=1.0)
    counts = [shape.get(key, 0) for key in ("zero_rows", "large_rows", "small_rows")]
    special = permutation(generator, rows)[: sum(counts)]
    for factor, chosen in zip((0.0, 3e4, 1e-4), special.split(counts), strict=True):
        hidden[chosen] *= factor
    return hidden.bfloat16(), weight


def reference(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    x = hidden_states.to(wide)
    r = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS)
    return (x * r * weight.to(wide)).to(hidden_states.dtype)


def COST(shape: Shape) -> Cost:
    """Input and output cross memory once; five operations per element."""
    rows = shape["R"]
    return Cost(bytes=2 * HEAD_DIM * (2 * rows + 1), flops=5 * HEAD_DIM * rows, unit="fp32")
