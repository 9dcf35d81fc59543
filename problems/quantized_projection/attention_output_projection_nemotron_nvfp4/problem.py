"""Attention output projection in NVFP4, its activations quantised on the way, with a residual add (Nemotron-3-Nano).

T tokens, K input channels, N output channels. FP8 is e4m3 without infinities: largest 448.

Inputs, contiguous and row-major:
  attn        [T, K]     bfloat16       attention's output, heads side by side
  x_gscale    [1]        float32        factor of the activations' NVFP4 form
  w_o_packed  [N, K/2]   uint8          weight, NVFP4: output channels by input channels
  w_o_scale   [N, K/16]  float8_e4m3fn
  w_o_gscale  [1]        float32
  residual    [T, N]     bfloat16

Output, contiguous and row-major:
  hidden      [T, N]     bfloat16

NVFP4: byte j of a row of packed holds element 2 j in bits 0 to 3 and element 2 j + 1 in bits 4 to 7. A code has its
sign in bit 3; codes 0 ... 7 have the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. scale is plain row-major, one for 16
consecutive elements of a row. Element [n, k] is code * scale[n, k // 16] * gscale.

The activations are quantised likewise. For every token t and group b of 16 channels k = 16 b ... 16 b + 15, with
x = float32(attn[t]), in float32:
  s[t, b] = e4m3(min(max_k |x[k]| / (6 * x_gscale), 448))             nearest, ties to even, subnormal numbers kept
  r[k]    = |x[k]| / (s[t, b] * x_gscale)
  c[t, k] = sign(x[k]) * the nearest to r[k] of 0, 0.5, 1, 1.5, 2, 3, 4, 6
            0 up to 0.25, 0.5 below 0.75, 1 up to 1.25, 1.5 below 1.75, 2 up to 2.5, 3 below 3.5, 4 up to 5, 6 above
  c[t, k] = 0 for the whole group if s[t, b] = 0
Then, in float32:
  y[t, n] = x_gscale * w_o_gscale * sum_k (c[t, k] * s[t, k // 16]) * (code[n, k] * w_o_scale[n, k // 16])
  hidden[t, n] = bfloat16(float32(residual[t, n]) + float32(bfloat16(y[t, n])))

Numerics: divisions are true float32 divisions, also that by s * x_gscale, which is itself rounded to float32. Elements
may lie on a tie or next to one: a product with a reciprocal may give other codes, and need not be within the tolerance.
Sums are accumulated in float32; y is rounded to bfloat16 before the residual is added, the sum once more, to nearest
even. Rounding only once is within the tolerance. A code times its scale is exact in bfloat16; gscale times that is not.

Rules:
- K is a multiple of 16; T is any positive number.
- A group may be all zero. Some tokens are so small that their scales are subnormal e4m3 numbers.
- x_gscale may be smaller than the activations need: then scales saturate at 448 and codes at 6.
- The inputs are not changed; hidden is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal
from mkb_env.problems.quantized_projection.common import (
    draw_calibrated,
    draw_fp4_weight,
    fp4_linear,
    fp4_quantize,
    fp4_specs,
    fp4_values,
    spec_bytes,
)

TITLE = "Attention output projection with NVFP4 weights and dynamic NVFP4 activations, residual add"
NUMBER = 59
MODEL = "Nemotron-3-Nano-30B-A3B"
INPUTS = ("attn", "x_gscale", "w_o_packed", "w_o_scale", "w_o_gscale", "residual")
OUTPUTS = ("hidden",)
HOST_VISIBLE = ()
TINY = 2.0**-15
ROWS = {"row_factors": [0.0, TINY, TINY]}
WORKLOADS = {
    "full": {"T": 4096, "K": 4096, "N": 2688, **ROWS},
    "small": {"T": 8, "K": 256, "N": 96, **ROWS},
    "heldout": [
        {"T": 1, "K": 4096, "N": 2688},
        {"T": 1023, "K": 4096, "N": 2688, "calibration": 1 / 3, "row_factors": [0.0]},
        {"T": 5, "K": 336, "N": 80, "calibration": 0.5, "row_factors": [0.0]},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    return (
        ((shape["T"], shape["K"]), torch.bfloat16),
        ((1,), torch.float32),
        *fp4_specs(shape["N"], shape["K"]),
        ((shape["T"], shape["N"]), torch.bfloat16),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["N"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal activations; tokens with a tiny ``attn`` have as tiny a residual; in ``INPUTS``' order."""
    attn, x_gscale = draw_calibrated(generator, shape["T"], shape["K"], shape)
    weight = draw_fp4_weight(generator, shape["N"], shape["K"])
    residual = normal(generator, shape["T"], shape["N"])
    largest = attn.abs().amax(dim=-1, keepdim=True)
    residual *= torch.where((largest > 0) & (largest < 16 * TINY), TINY, 1.0)
    return attn, x_gscale, *weight, residual.bfloat16()


def reference(
    attn: torch.Tensor,
    x_gscale: torch.Tensor,
    w_o_packed: torch.Tensor,
    w_o_scale: torch.Tensor,
    w_o_gscale: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """The module's formula; for float64 inputs nothing but the activations' codes and scales is rounded."""
    wide = torch.promote_types(attn.dtype, torch.float32)
    x = fp4_values(*fp4_quantize(attn, x_gscale), wide)
    y = fp4_linear(x, w_o_packed, w_o_scale, x_gscale * w_o_gscale)
    return (residual.to(wide) + y.to(residual.dtype)).to(residual.dtype)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add for every token and weight, as bfloat16 since FP4 must be widened."""
    size = spec_bytes(*input_specs(shape), *output_specs(shape))
    return Cost(bytes=size, flops=2 * shape["T"] * shape["K"] * shape["N"], unit="bf16")
