"""MLP of a ConvNeXt-V2 block, channels last: expand, GELU, Global Response Normalisation over the image, contract.

There are B images of H x W pixels with C channels; the hidden width is F.

Inputs, contiguous and row-major:
  x      [B, H, W, C]  float32
  w1     [F, C]        float32  first weight, [out, in]
  b1     [F]           float32
  grn_w  [F]           float32  scale of the normalised response
  grn_b  [F]           float32  its offset
  w2     [C, F]        float32  second weight, [out, in]
  b2     [C]           float32

Output, contiguous and row-major:
  y      [B, H, W, C]  float32

With products and elementwise operations at every pixel:
  h = x @ w1^T + b1
  a = 0.5 * h * (1 + erf(h / sqrt(2)))              (the exact GELU)
  G[b, f] = sqrt(sum over all H W pixels of image b of a[b, :, :, f]^2)
  n[b, f] = G[b, f] / (mean over all F channels of G[b, :] + 1e-6)
  g = grn_w * (a * n) + grn_b + a                   (n is the same at every pixel of an image)
  y = g @ w2^T + b2

Numerics: everything is float32, G and its mean are accumulated in float32. Operands of the two products may be rounded
to TF32 (to nearest) if sums are accumulated in float32; truncating them to TF32, or rounding them to bfloat16, is too
coarse.

Rules:
- G belongs to one image and one channel: images never mix, whatever H W is.
- An image may have a = 0 everywhere: then G = 0, n = 0 and y = grn_b @ w2^T + b2.
- The block's convolution, LayerNorm and residual are not part of this.
- C and F are multiples of 4; B, H and W are any positive numbers.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, linear

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import fp32_gemm_allowance

TITLE = "ConvNeXt-V2 MLP with Global Response Normalisation"
NUMBER = 30
MODEL = "ConvNeXt-V2 Tiny"
INPUTS = ("x", "w1", "b1", "grn_w", "grn_b", "w2", "b2")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
EPS = 1e-6
DEAD = -20.0
"""A first bias below which GELU is 0 at every standard normal input, in float32 and in float64."""
WORKLOADS = {
    "full": {"B": 128, "H": 14, "W": 14, "C": 384, "F": 1536, "zero_image": 1},
    "small": {"B": 3, "H": 3, "W": 3, "C": 24, "F": 96, "zero_image": 1},
    "heldout": [
        {"B": 3, "H": 7, "W": 7, "C": 768, "F": 3072},
        {"B": 2, "H": 57, "W": 31, "C": 96, "F": 384, "zero_image": 1},
        {"B": 3, "H": 5, "W": 3, "C": 20, "F": 80},
    ],
}
allowance = fp32_gemm_allowance


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    channels, hidden = shape["C"], shape["F"]
    image = (shape["B"], shape["H"], shape["W"], channels)
    sizes = (image, (hidden, channels), (hidden,), (hidden,), (hidden,), (channels, hidden), (channels,))
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["H"], shape["W"], shape["C"]), torch.float32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal pixels, weights that keep their scale, small biases, in ``INPUTS``' order.

    With ``zero_image``, the image of that number is 0, and so is b1, except in an eighth of the channels, at random
    places, where it is -20: there GELU is 0 in every image.
    """
    channels, hidden = shape["C"], shape["F"]
    x = normal(generator, shape["B"], shape["H"], shape["W"], channels)
    w1 = normal(generator, hidden, channels, scale=channels**-0.5)
    b1 = normal(generator, hidden, scale=0.1)
    grn_w = normal(generator, hidden, scale=0.5)
    grn_b = normal(generator, hidden, scale=0.1)
    w2 = normal(generator, channels, hidden, scale=hidden**-0.5)
    b2 = normal(generator, channels, scale=0.1)
    if "zero_image" in shape:
        x[shape["zero_image"]] = 0.0
        b1.zero_()
        b1[permutation(generator, hidden)[: hidden // 8]] = DEAD
    return x, w1, b1, grn_w, grn_b, w2, b2


def reference(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    grn_w: torch.Tensor,
    grn_b: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    a = gelu(linear(x, w1, b1))
    response = a.square().sum(dim=(1, 2), keepdim=True).sqrt()
    n = response / (response.mean(dim=-1, keepdim=True) + EPS)
    return linear(grn_w * (a * n) + grn_b + a, w2, b2)


def COST(shape: Shape) -> Cost:
    """Pixels, weights and output cross memory once; two operations per weight and pixel."""
    pixels, channels, hidden = shape["B"] * shape["H"] * shape["W"], shape["C"], shape["F"]
    elements = 2 * pixels * channels + 2 * channels * hidden + 3 * hidden + channels
    return Cost(bytes=4 * elements, flops=4 * pixels * channels * hidden, unit="tf32")
