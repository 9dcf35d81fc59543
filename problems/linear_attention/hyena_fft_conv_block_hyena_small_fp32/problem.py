"""Hyena operator of order 2: projection, short convolution, gate, long causal convolution, gate, projection.

There are B sequences of L tokens and D channels; the long filter has Lmax >= L taps, of which the first L count.

Inputs, contiguous and row-major:
  u            [B, L, D]  float32
  w_in         [3 D, D]   float32  input projection
  b_in         [3 D]      float32
  short_w      [3 D, 3]   float32  short causal filter of every projected channel; tap 2 is the present token's
  short_b      [3 D]      float32
  filter       [D, Lmax]  float32  long causal filter of every channel; tap 0 is the present token's
  filter_bias  [D]        float32
  w_out        [D, D]     float32  output projection
  b_out        [D]        float32

Output, contiguous and row-major:
  y            [B, L, D]  float32

For every sequence, token t and channel:
  z[t, c]  = sum_d u[t, d] w_in[c, d] + b_in[c]                                  for c < 3 D
  s[t, c]  = short_b[c] + sum_{i=0..2} short_w[c, i] z[t - 2 + i, c]             with z = 0 before the first token
  x0 = s[:, 0:D];  x1 = s[:, D:2D];  v = s[:, 2D:3D]
  p[t, d]  = v[t, d] x1[t, d]
  r[t, d]  = sum_{j=0..t} filter[d, j] p[t - j, d] + filter_bias[d] p[t, d]
  y[t, e]  = sum_d r[t, d] x0[t, d] w_out[e, d] + b_out[e]

Numerics: everything is in float32 and accumulated in float32; products of operands rounded to TF32 or bfloat16 are too
coarse. The long convolution may be summed directly or by Fourier transforms.

Rules:
- All convolutions are causal and start from nothing: no token sees a later one, and the end of a sequence does not wrap
  around to its beginning.
- The bias b_in enters z, so also the short convolution, but not the zeros before the first token.
- L is any positive number, not always a power of two, and may be smaller than Lmax.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal

TITLE = "Hyena operator: projections, short convolution, gates, long convolution"
NUMBER = 67
MODEL = "Hyena-small"
INPUTS = ("u", "w_in", "b_in", "short_w", "short_b", "filter", "filter_bias", "w_out", "b_out")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 8, "L": 2048, "Lmax": 2048, "D": 864},
    "small": {"B": 1, "L": 32, "Lmax": 40, "D": 16},
    "heldout": [
        {"B": 3, "L": 1000, "Lmax": 2048, "D": 864},
        {"B": 2, "L": 1, "Lmax": 2048, "D": 864},
        {"B": 2, "L": 19, "Lmax": 64, "D": 36},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    batch, tokens, taps, dim = shape["B"], shape["L"], shape["Lmax"], shape["D"]
    sizes = (
        *((batch, tokens, dim), (3 * dim, dim), (3 * dim,), (3 * dim, 3), (3 * dim,)),
        *((dim, taps), (dim,), (dim, dim), (dim,)),
    )
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return input_specs(shape)[:1]


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal tensors, scaled so that every stage stays near 1; filters that fade, faster in later channels."""
    dim, taps = shape["D"], shape["Lmax"]
    scales = (1.0, dim**-0.5, 0.1, 3**-0.5, 0.1, math.sqrt(6 / taps), 1.0, dim**-0.5, 0.1)
    inputs = [
        normal(generator, *size, scale=scale) for (size, _), scale in zip(input_specs(shape), scales, strict=True)
    ]
    fading = torch.linspace(3, 15, dim, device=generator.device)[:, None]
    inputs[5] *= torch.exp(-fading * torch.arange(taps, device=generator.device) / taps)
    return tuple(inputs)


def stages(
    u: torch.Tensor, w_in: torch.Tensor, b_in: torch.Tensor, short_w: torch.Tensor, short_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x0, x1 and v, each [B, D, L]."""
    z = torch.nn.functional.pad((u @ w_in.T + b_in).transpose(1, 2), (2, 0))
    s = short_b[:, None] + sum(short_w[:, i, None] * z[..., i : i + u.shape[1]] for i in range(3))
    x0, x1, v = s.chunk(3, dim=1)
    return x0, x1, v


def long_convolution(p: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Causal convolution of [B, D, L] with [D, L] by Fourier transforms of 2 L points."""
    length = p.shape[-1]
    spectrum = torch.fft.rfft(p, n=2 * length) * torch.fft.rfft(taps, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length]


def reference(
    u: torch.Tensor,
    w_in: torch.Tensor,
    b_in: torch.Tensor,
    short_w: torch.Tensor,
    short_b: torch.Tensor,
    filter: torch.Tensor,
    filter_bias: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
) -> torch.Tensor:
    """The module's formula, in the inputs' type."""
    x0, x1, v = stages(u, w_in, b_in, short_w, short_b)
    p = v * x1
    r = long_convolution(p, filter[:, : u.shape[1]]) + filter_bias[:, None] * p
    return (r * x0).transpose(1, 2) @ w_out.T + b_out


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Allowed absolute error: 32 eps times a token's largest |y|, or the rms of all y where that is larger.

    Two projections, transforms of 2 L points or direct sums, and three gates in float32 err by 3 to 15 eps on this
    scale at every size (TF32 by thousands), so the bound need not follow the reference's own luck in a small output.
    """
    scale = torch.maximum(anchor.abs().amax(dim=-1, keepdim=True), anchor.square().mean().sqrt())
    return (32 * torch.finfo(torch.float32).eps * scale).expand_as(anchor)


def COST(shape: Shape) -> Cost:
    """Every tensor that counts crosses memory once; two projections, and the cheaper of two ways to convolve."""
    batch, tokens, dim = shape["B"], shape["L"], shape["D"]
    moved = 4 * (2 * batch * tokens * dim + 4 * dim * dim + dim * tokens + 17 * dim)
    directly = batch * dim * tokens * (tokens + 1)
    by_transforms = int(10 * batch * dim * tokens * math.log2(2 * tokens))
    return Cost(moved, flops=8 * batch * tokens * dim * dim + min(directly, by_transforms), unit="3xtf32")
