"""Gate and up projections of an MLP in FP8, joined by SwiGLU (Qwen3-VL-8B text layers).

T tokens, H input channels, I intermediate channels. FP8 is e4m3 without infinities: largest 448.

Inputs, contiguous and row-major:
  x          [T, H]            bfloat16
  w_gate_up  [2 I, H]          float8_e4m3fn  codes of both weights: rows 0 to I - 1 gate, rows I to 2 I - 1 up
  w_scale    [2 I/128, H/128]  float32        their scales, one for 128 x 128 codes

Output, contiguous and row-major:
  act        [T, I]            bfloat16

The activations are quantised first. For every token t and block b of 128 channels k = 128 b ... 128 b + 127, in
float32:
  s[t, b] = max(max_k |x[t, k]|, 1e-10) / 448
  q[t, k] = e4m3(clamp(x[t, k] / s[t, b], -448, 448))       nearest, ties to even
Then, in float32, for n = 0 ... 2 I - 1 and i = 0 ... I - 1:
  y[t, n] = sum_b s[t, b] * w_scale[n // 128, b] * sum_{k in b} q[t, k] * w_gate_up[n, k]
  g = y[t, i],  u = y[t, I + i]
  act[t, i] = bfloat16(g / (1 + exp(-g)) * u)

Numerics: divisions of the quantiser are true float32 divisions; sums are accumulated in float32; g and u are not
rounded before the product, which is rounded once, to nearest even.

Rules:
- H and I are multiples of 128; T is any positive number.
- A token may be all zero (its act is 0) or large, so that |g| reaches several hundred: where exp(-g) overflows, act is
  0, never NaN.
- w_gate_up holds no NaN.
- The inputs are not changed; act is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.quantized_projection.common import (
    draw_fp8_weight,
    draw_rows,
    fp8_linear,
    fp8_weight_specs,
    spec_bytes,
)

TITLE = "Fused gate and up projections with SwiGLU, block FP8 weights and dynamic FP8 activations"
NUMBER = 53
MODEL = "Qwen3-VL-8B"
INPUTS = ("x", "w_gate_up", "w_scale")
OUTPUTS = ("act",)
HOST_VISIBLE = ()
ROW_FACTORS = [0.0, 128.0]
WORKLOADS = {
    "full": {"T": 2048, "H": 4096, "I": 12288, "row_factors": ROW_FACTORS},
    "small": {"T": 8, "H": 256, "I": 128, "row_factors": ROW_FACTORS},
    "heldout": [
        {"T": 1, "H": 4096, "I": 3072},
        {"T": 511, "H": 4096, "I": 12288, "gains": [-1, 1]},
        {"T": 5, "H": 384, "I": 256, "row_factors": ROW_FACTORS},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    return ((shape["T"], shape["H"]), torch.bfloat16), *fp8_weight_specs(2 * shape["I"], shape["H"])


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["I"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal activations, rows scaled by ``gains`` and ``row_factors``; in ``INPUTS``' order."""
    x = draw_rows(generator, shape["T"], shape["H"], shape)
    return x, *draw_fp8_weight(generator, 2 * shape["I"], shape["H"])


def reference(x: torch.Tensor, w_gate_up: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """The module's formula; for float64 inputs nothing but the activations' codes is rounded."""
    g, u = fp8_linear(x, w_gate_up, w_scale).chunk(2, dim=-1)
    return (silu(g) * u).to(x.dtype)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add for every token and weight."""
    size = spec_bytes(*input_specs(shape), *output_specs(shape))
    return Cost(bytes=size, flops=4 * shape["T"] * shape["H"] * shape["I"], unit="fp8")
