"""Gradients of linear, tanh GELU, linear (feed-forward of a Step1X-Edit transformer block).

The forward pass was y = w2 gelu(w1 x + b1) + b2; only its inputs were kept. M rows, D channels, F inner channels.

Inputs, contiguous and row-major:
  grad_y   [M, D]  float32  gradient of y
  x        [M, D]  float32
  w1       [F, D]  float32  [out, in]
  b1       [F]     float32
  w2       [D, F]  float32  [out, in]

Outputs, a tuple in this order, contiguous and row-major:
  grad_x   [M, D]  float32
  grad_w1  [F, D]  float32
  grad_b1  [F]     float32
  grad_w2  [D, F]  float32
  grad_b2  [D]     float32

The first half of the forward pass again:
  f = x w1^T + b1
  t = tanh(k (f + 0.044715 f^3)),  k = sqrt(2 / pi)
  p = 0.5 f (1 + t)
and then, back from y:
  grad_b2 = sum over rows of grad_y
  grad_w2 = grad_y^T p
  df = (grad_y w2) (0.5 (1 + t) + 0.5 f (1 - t^2) k (1 + 3 * 0.044715 f^2))    (element by element)
  grad_b1 = sum over rows of df
  grad_w1 = df^T x
  grad_x = df w1

Numerics: everything is in float32. Matrix products whose operands are rounded to TF32 (to nearest, not cut off),
accumulated in float32, are within the tolerance; operands rounded to bfloat16 are not. Sums over rows may be taken in
any order. Where |f| is large, t is +-1 and the derivative 1 or 0, not NaN; channels like that occur.

M is any positive number, D and F are multiples of 16. The inputs are not changed; every output is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import fp32_gradient_allowance, gelu_tanh_backward

TITLE = "Backward of linear, tanh GELU, linear"
NUMBER = 37
MODEL = "Step1X-Edit"
INPUTS = ("grad_y", "x", "w1", "b1", "w2")
OUTPUTS = ("grad_x", "grad_w1", "grad_b1", "grad_w2", "grad_b2")
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"M": 1536, "D": 3072, "F": 12288, "saturated": 8},
    "small": {"M": 10, "D": 48, "F": 96, "saturated": 1},
    "heldout": [
        {"M": 513, "D": 3072, "F": 12288, "saturated": 8},
        {"M": 77, "D": 1536, "F": 6144, "saturated": 1},
        {"M": 29, "D": 80, "F": 208, "saturated": 1},
    ],
}
allowance = fp32_gradient_allowance


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    rows, wide, inner = shape["M"], shape["D"], shape["F"]
    sizes = (rows, wide), (rows, wide), (inner, wide), (inner,), (wide, inner)
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    rows, wide, inner = shape["M"], shape["D"], shape["F"]
    sizes = (rows, wide), (inner, wide), (inner,), (wide, inner), (wide,)
    return tuple((size, torch.float32) for size in sizes)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal rows, weights that keep their scale, a bias of 0.1, in ``INPUTS``' order.

    At random inner channels, b1 is larger by 12 at ``saturated`` places and smaller by 12 at as many.
    """
    rows, wide, inner = shape["M"], shape["D"], shape["F"]
    grad_y, x = (normal(generator, rows, wide) for _ in range(2))
    w1, b1 = normal(generator, inner, wide, scale=wide**-0.5), normal(generator, inner, scale=0.1)
    w2 = normal(generator, wide, inner, scale=inner**-0.5)
    raised, lowered = permutation(generator, inner)[: 2 * shape["saturated"]].chunk(2)
    b1[raised] += 12.0
    b1[lowered] -= 12.0
    return grad_y, x, w1, b1, w2


def reference(
    grad_y: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The module's formulas; float64 inputs are computed in float64."""
    p, slope = gelu_tanh_backward(torch.nn.functional.linear(x, w1, b1))
    df = (grad_y @ w2) * slope
    return df @ w1, df.T @ x, df.sum(dim=0), grad_y.T @ p, grad_y.sum(dim=0)


def COST(shape: Shape) -> Cost:
    """Three tensors of M rows, weights, a bias and gradients cross memory once; five products."""
    rows, wide, inner = shape["M"], shape["D"], shape["F"]
    return Cost(
        bytes=4 * (3 * rows * wide + 4 * wide * inner + 2 * inner + wide),
        flops=10 * rows * wide * inner,
        unit="tf32",
    )
