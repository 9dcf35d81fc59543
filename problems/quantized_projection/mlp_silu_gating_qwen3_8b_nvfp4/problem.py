"""Gate and up projections of an MLP in NVFP4, their input quantised on the way, joined by SiLU gating (Qwen3-8B).

T tokens, H input channels, I intermediate channels. FP8 is e4m3 without infinities: largest 448.

Inputs, contiguous and row-major:
  x              [T, H]     bfloat16
  x_gscale       [1]        float32        factor of the activations' NVFP4 form
  w_gate_packed  [I, H/2]   uint8          gate weight, NVFP4: output channels by input channels
  w_gate_scale   [I, H/16]  float8_e4m3fn
  w_gate_gscale  [1]        float32
  w_up_packed    [I, H/2]   uint8          up weight, NVFP4, with a factor of its own
  w_up_scale     [I, H/16]  float8_e4m3fn
  w_up_gscale    [1]        float32

Output, contiguous and row-major:
  act            [T, I]     bfloat16

NVFP4: byte j of a row of packed holds element 2 j in bits 0 to 3 and element 2 j + 1 in bits 4 to 7. A code has its
sign in bit 3; codes 0 ... 7 have the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. scale is plain row-major, one for 16
consecutive elements of a row. Element [n, k] is code * scale[n, k // 16] * gscale.

The activations are quantised likewise, once for both weights. For every token t and group b of 16 channels
k = 16 b ... 16 b + 15, with v = float32(x[t]), in float32:
  s[t, b] = e4m3(min(max_k |v[k]| / (6 * x_gscale), 448))             nearest, ties to even, subnormal numbers kept
  r[k]    = |v[k]| / (s[t, b] * x_gscale)
  c[t, k] = sign(v[k]) * the nearest to r[k] of 0, 0.5, 1, 1.5, 2, 3, 4, 6
            0 up to 0.25, 0.5 below 0.75, 1 up to 1.25, 1.5 below 1.75, 2 up to 2.5, 3 below 3.5, 4 up to 5, 6 above
  c[t, k] = 0 for the whole group if s[t, b] = 0
Then, in float32:
  g[t, i] = x_gscale * w_gate_gscale * sum_k (c[t, k] * s[t, k // 16]) * (gate_code[i, k] * w_gate_scale[i, k // 16])
  u[t, i] = x_gscale * w_up_gscale   * sum_k (c[t, k] * s[t, k // 16]) * (up_code[i, k]   * w_up_scale[i, k // 16])
  act[t, i] = bfloat16(g / (1 + exp(-g)) * u)

Numerics: divisions of the quantiser are true float32 divisions, also that by s * x_gscale, which is itself rounded to
float32. Elements often lie on a tie or next to one, so a product with a reciprocal gives other codes.
Sums are accumulated in float32; g and u are not rounded before the product, which is rounded once, to
nearest even. A code times its scale is exact in bfloat16; gscale times that is not.

Rules:
- H is a multiple of 16; T is any positive number.
- A group or a token may be all zero. Some tokens are so small that their scales are subnormal e4m3 numbers.
- x_gscale may be smaller than the activations need: then scales saturate at 448 and codes at 6.
- The inputs are not changed; act is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.quantized_projection.common import (
    draw_calibrated,
    draw_fp4_weight,
    fp4_linear,
    fp4_quantize,
    fp4_specs,
    fp4_values,
    spec_bytes,
)

TITLE = "Gate and up projections in NVFP4 with SiLU gating, dynamic NVFP4 activations"
NUMBER = 61
MODEL = "Qwen3-8B"
INPUTS = (
    "x", "x_gscale", "w_gate_packed", "w_gate_scale", "w_gate_gscale", "w_up_packed", "w_up_scale", "w_up_gscale",
)  # fmt: skip
OUTPUTS = ("act",)
HOST_VISIBLE = ()
UP_GAIN = 1.25
ROWS = {"row_factors": [0.0, 2.0**-15, 2.0**-15, 4.0], "calibration": 0.25}
WORKLOADS = {
    "full": {"T": 2048, "H": 4096, "I": 12288, **ROWS},
    "small": {"T": 8, "H": 128, "I": 96, **ROWS},
    "heldout": [
        {"T": 1, "H": 4096, "I": 1536},
        {"T": 515, "H": 4096, "I": 12288, "calibration": 1 / 3, "row_factors": [0.0]},
        {"T": 5, "H": 336, "I": 80, "calibration": 0.5, "row_factors": [0.0]},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    weight = fp4_specs(shape["I"], shape["H"])
    return ((shape["T"], shape["H"]), torch.bfloat16), ((1,), torch.float32), *weight, *weight


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["I"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal activations with ``row_factors``; the up weight is larger by a quarter; in ``INPUTS``' order."""
    x, x_gscale = draw_calibrated(generator, shape["T"], shape["H"], shape)
    gate, up = (draw_fp4_weight(generator, shape["I"], shape["H"], gain) for gain in (1.0, UP_GAIN))
    return x, x_gscale, *gate, *up


def reference(
    x: torch.Tensor,
    x_gscale: torch.Tensor,
    w_gate_packed: torch.Tensor,
    w_gate_scale: torch.Tensor,
    w_gate_gscale: torch.Tensor,
    w_up_packed: torch.Tensor,
    w_up_scale: torch.Tensor,
    w_up_gscale: torch.Tensor,
) -> torch.Tensor:
    """The module's formula; for float64 inputs nothing but the activations' codes and scales is rounded."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = fp4_values(*fp4_quantize(x, x_gscale), wide)
    g = fp4_linear(rows, w_gate_packed, w_gate_scale, x_gscale * w_gate_gscale)
    u = fp4_linear(rows, w_up_packed, w_up_scale, x_gscale * w_up_gscale)
    return (silu(g) * u).to(x.dtype)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add for every token and weight, as bfloat16 since FP4 must be widened."""
    size = spec_bytes(*input_specs(shape), *output_specs(shape))
    return Cost(bytes=size, flops=4 * shape["T"] * shape["H"] * shape["I"], unit="bf16")
