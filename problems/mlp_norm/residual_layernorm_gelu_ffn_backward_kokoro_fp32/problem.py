"""Gradients of feed-forward, residual add and LayerNorm (the ALBERT layer of Kokoro's phoneme encoder).

The forward pass was y = LayerNorm(ffn(a) + a) with ffn(a) = w2 gelu(w1 a + b1) + b2 and a = a layer's attention output;
only its inputs were kept. B sequences of T phonemes, D channels, F inner channels; M = B T rows in all.

Inputs, contiguous and row-major:
  grad_y      [B, T, D]  float32  gradient of y
  a           [B, T, D]  float32
  w1          [F, D]     float32  [out, in]
  b1          [F]        float32
  w2          [D, F]     float32  [out, in]
  b2          [D]        float32
  gamma       [D]        float32  the norm's weight (its bias, beta, does not enter)

Outputs, a tuple in this order, contiguous and row-major:
  grad_a      [B, T, D]  float32
  grad_w1     [F, D]     float32
  grad_b1     [F]        float32
  grad_w2     [D, F]     float32
  grad_b2     [D]        float32
  grad_gamma  [D]        float32
  grad_beta   [D]        float32

With a and grad_y as [M, D], the forward pass again, row by row:
  f = a w1^T + b1
  t = tanh(k (f + 0.044715 f^3)),  k = sqrt(2 / pi)
  p = 0.5 f (1 + t)
  s = p w2^T + b2 + a
  mu = mean(s),  r = 1 / sqrt(mean((s - mu)^2) + 1e-12),  z = (s - mu) r      (over the D channels)
and then, back from y:
  grad_gamma = sum over rows of grad_y z
  grad_beta = sum over rows of grad_y
  q = grad_y gamma
  ds = r (q - mean(q) - z mean(q z))                                           (over the D channels)
  grad_b2 = sum over rows of ds
  grad_w2 = ds^T p
  df = (ds w2) (0.5 (1 + t) + 0.5 f (1 - t^2) k (1 + 3 * 0.044715 f^2))        (element by element)
  grad_b1 = sum over rows of df
  grad_w1 = df^T a
  grad_a = df w1 + ds

Numerics: everything is in float32. Matrix products whose operands are rounded to TF32 (to nearest, not cut off),
accumulated in float32, are within the tolerance; operands rounded to bfloat16 are not. Sums over rows may be taken in
any order. Where |f| is large, t is +-1 and the derivative 1 or 0, not NaN; channels like that occur.

B and T are any positive numbers, D and F multiples of 16. The inputs are not changed; every output is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import fp32_gradient_allowance, gelu_tanh_backward

TITLE = "Backward of feed-forward + residual + LayerNorm"
NUMBER = 35
MODEL = "Kokoro-82M"
INPUTS = ("grad_y", "a", "w1", "b1", "w2", "b2", "gamma")
OUTPUTS = ("grad_a", "grad_w1", "grad_b1", "grad_w2", "grad_b2", "grad_gamma", "grad_beta")
HOST_VISIBLE = ()
EPS = 1e-12
WORKLOADS = {
    "full": {"B": 16, "T": 512, "D": 768, "F": 2048, "saturated": 8},
    "small": {"B": 2, "T": 4, "D": 64, "F": 128, "saturated": 1},
    "heldout": [
        {"B": 3, "T": 171, "D": 768, "F": 2048, "saturated": 8},
        {"B": 1, "T": 1, "D": 768, "F": 2048, "saturated": 8},
        {"B": 3, "T": 11, "D": 80, "F": 208, "saturated": 1},
    ],
}
allowance = fp32_gradient_allowance


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    rows, wide, inner = (shape["B"], shape["T"], shape["D"]), shape["D"], shape["F"]
    return tuple(
        (sizes, torch.float32) for sizes in (rows, rows, (inner, wide), (inner,), (wide, inner), *[(wide,)] * 2)
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    rows, wide, inner = (shape["B"], shape["T"], shape["D"]), shape["D"], shape["F"]
    return tuple((sizes, torch.float32) for sizes in (rows, (inner, wide), (inner,), (wide, inner), *[(wide,)] * 3))


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal rows, weights that keep their scale, biases of 0.1, gamma around 1, in ``INPUTS``' order.

    At random inner channels, b1 is larger by 12 at ``saturated`` places and smaller by 12 at as many.
    """
    batch, length, wide, inner = (shape[key] for key in ("B", "T", "D", "F"))
    grad_y, a = (normal(generator, batch, length, wide) for _ in range(2))
    w1, b1 = normal(generator, inner, wide, scale=wide**-0.5), normal(generator, inner, scale=0.1)
    w2, b2 = normal(generator, wide, inner, scale=inner**-0.5), normal(generator, wide, scale=0.1)
    gamma = normal(generator, wide, scale=0.1, mean=1.0)
    raised, lowered = permutation(generator, inner)[: 2 * shape["saturated"]].chunk(2)
    b1[raised] += 12.0
    b1[lowered] -= 12.0
    return grad_y, a, w1, b1, w2, b2, gamma


def reference(
    grad_y: torch.Tensor,
    a: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    gamma: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The module's formulas; float64 inputs are computed in float64."""
    rows, grad_rows = a.flatten(0, 1), grad_y.flatten(0, 1)
    p, slope = gelu_tanh_backward(torch.nn.functional.linear(rows, w1, b1))
    s = torch.nn.functional.linear(p, w2, b2) + rows
    centred = s - s.mean(dim=-1, keepdim=True)
    r = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + EPS)
    z = centred * r
    q = grad_rows * gamma
    ds = r * (q - q.mean(dim=-1, keepdim=True) - z * (q * z).mean(dim=-1, keepdim=True))
    df = (ds @ w2) * slope
    grad_a = (df @ w1 + ds).view(a.shape)
    grad_gamma, grad_beta = (grad_rows * z).sum(dim=0), grad_rows.sum(dim=0)
    return grad_a, df.T @ rows, df.sum(dim=0), ds.T @ p, ds.sum(dim=0), grad_gamma, grad_beta


def COST(shape: Shape) -> Cost:
    """Three tensors of M rows, weights, vectors and their gradients cross memory once; six products."""
    rows, wide, inner = shape["B"] * shape["T"], shape["D"], shape["F"]
    return Cost(
        bytes=4 * (3 * rows * wide + 4 * wide * inner + 5 * wide + 2 * inner),
        flops=12 * rows * wide * inner,
        unit="tf32",
    )
