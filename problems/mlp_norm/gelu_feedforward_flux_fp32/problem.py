"""Feed-forward of a diffusion transformer block: linear, tanh GELU, linear (FLUX.1, image branch).

There are B images of S tokens, width D, hidden width F.

Inputs, contiguous and row-major:
  x   [B, S, D]  float32
  w1  [F, D]     float32  first weight, [out, in]
  b1  [F]        float32
  w2  [D, F]     float32  second weight, [out, in]
  b2  [D]        float32

Output, contiguous and row-major:
  y   [B, S, D]  float32

For every token:
  h = x @ w1^T + b1
  a = 0.5 * h * (1 + tanh(sqrt(2 / pi) * (h + 0.044715 * h^3)))
  y = a @ w2^T + b2

Numerics: everything is float32. Operands of the two products may be rounded to TF32 (to nearest) if sums are
accumulated in float32; truncating them to TF32, or rounding them to bfloat16, is too coarse. Elements of h may exceed
100 in magnitude, where tanh is exactly 1 or -1; the result stays finite there.

Rules:
- There is no dropout, residual or gate.
- D and F are multiples of 4; B and S are any positive numbers.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, linear

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import fp32_gemm_allowance

TITLE = "Feed-forward: linear, tanh GELU, linear"
NUMBER = 29
MODEL = "FLUX.1"
INPUTS = ("x", "w1", "b1", "w2", "b2")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 1, "S": 4096, "D": 3072, "F": 12288, "large_tokens": 2},
    "small": {"B": 2, "S": 5, "D": 48, "F": 192, "large_tokens": 1},
    "heldout": [
        {"B": 1, "S": 513, "D": 3072, "F": 12288},
        {"B": 2, "S": 77, "D": 1536, "F": 6144, "large_tokens": 1},
        {"B": 3, "S": 7, "D": 52, "F": 140, "large_tokens": 1},
    ],
}
allowance = fp32_gemm_allowance


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    width, hidden = shape["D"], shape["F"]
    sizes = ((shape["B"], shape["S"], width), (hidden, width), (hidden,), (width, hidden), (width,))
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["S"], shape["D"]), torch.float32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal tokens, weights that keep their scale, small biases, in ``INPUTS``' order.

    At random places, ``large_tokens`` tokens are scaled by 100.
    """
    width, hidden = shape["D"], shape["F"]
    x = normal(generator, shape["B"], shape["S"], width)
    w1 = normal(generator, hidden, width, scale=width**-0.5)
    b1 = normal(generator, hidden, scale=0.1)
    w2 = normal(generator, width, hidden, scale=hidden**-0.5)
    b2 = normal(generator, width, scale=0.1)
    tokens = x.view(-1, width)
    tokens[permutation(generator, len(tokens))[: shape.get("large_tokens", 0)]] *= 100
    return x, w1, b1, w2, b2


def reference(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    return linear(gelu(linear(x, w1, b1), approximate="tanh"), w2, b2)


def COST(shape: Shape) -> Cost:
    """Tokens, weights, biases and output cross memory once; two operations per weight and token."""
    tokens, width, hidden = shape["B"] * shape["S"], shape["D"], shape["F"]
    elements = 2 * tokens * width + 2 * width * hidden + width + hidden
    return Cost(bytes=4 * elements, flops=4 * tokens * width * hidden, unit="tf32")
