"""Attention output projection in FP8 with a residual add (Qwen3-VL-8B text layers).

T tokens, Hq heads of 128 channels, K = Hq * 128, N output channels. FP8 is e4m3 without infinities: largest 448.

Inputs, contiguous and row-major:
  attn      [T, Hq, 128]      bfloat16       attention's output, per head
  w         [N, K]            float8_e4m3fn  codes of the projection's weight, output channels by input channels
  w_scale   [N/128, K/128]    float32        the weight's scales, one for 128 x 128 codes
  residual  [T, N]            bfloat16

Output, contiguous and row-major:
  hidden    [T, N]            bfloat16

The activations are quantised first. For every token t and head b, with x = float32(attn[t, b]), in float32:
  s[t, b] = max(max_k |x[k]|, 1e-10) / 448
  q[t, b, k] = e4m3(clamp(x[k] / s[t, b], -448, 448))       nearest, ties to even
Then, with k running over the 128 channels of head b, in float32:
  y[t, n] = sum_b s[t, b] * w_scale[n // 128, b] * sum_k q[t, b, k] * w[n, 128 b + k]
  hidden[t, n] = bfloat16(float32(residual[t, n]) + float32(bfloat16(y[t, n])))

Numerics: divisions are true float32 divisions; sums are accumulated in float32; y is rounded to bfloat16 before the
residual is added, and the sum is rounded once more, both to nearest even. Rounding only once is within the tolerance.

Rules:
- K and N are multiples of 128; T is any positive number.
- A token's attn may be all zero: then its codes are 0 and its hidden is the residual. It may be much smaller than
  others, also smaller than the 1e-10, and its residual then 0.
- w holds no NaN.
- The inputs are not changed; hidden is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal
from mkb_env.problems.quantized_projection.common import (
    BLOCK,
    draw_fp8_weight,
    draw_rows,
    fp8_linear,
    fp8_weight_specs,
    spec_bytes,
)

TITLE = "Attention output projection with block FP8 weights and dynamic FP8 activations, residual add"
NUMBER = 52
MODEL = "Qwen3-VL-8B"
INPUTS = ("attn", "w", "w_scale", "residual")
OUTPUTS = ("hidden",)
HOST_VISIBLE = ()
ROW_FACTORS = [0.0, 0.0, 2.0**-6, 2.0**-31, 2.0**-40]
QUIET = 0.25
"""A token that is smaller than this but not zero has no residual, beside which it would not be seen."""
WORKLOADS = {
    "full": {"T": 4096, "heads": 32, "N": 4096, "row_factors": ROW_FACTORS},
    "small": {"T": 8, "heads": 2, "N": 256, "row_factors": ROW_FACTORS},
    "heldout": [
        {"T": 77, "heads": 32, "N": 4096, "row_factors": ROW_FACTORS},
        {"T": 3001, "heads": 32, "N": 4096},
        {"T": 5, "heads": 3, "N": 384, "row_factors": [0.0, 2.0**-6, 2.0**-40]},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, heads, rows = shape["T"], shape["heads"], shape["N"]
    return (
        ((tokens, heads, BLOCK), torch.bfloat16),
        *fp8_weight_specs(rows, heads * BLOCK),
        ((tokens, rows), torch.bfloat16),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["N"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal activations, some rows of ``attn`` times ``row_factors``, no residual beside the small ones."""
    tokens, heads, rows = shape["T"], shape["heads"], shape["N"]
    attn = draw_rows(generator, tokens, heads * BLOCK, shape).view(tokens, heads, BLOCK)
    w, w_scale = draw_fp8_weight(generator, rows, heads * BLOCK)
    largest = attn.abs().amax(dim=(1, 2)).unsqueeze(1)
    residual = normal(generator, tokens, rows, dtype=torch.bfloat16)
    return attn, w, w_scale, residual.masked_fill_((largest > 0) & (largest < QUIET), 0.0)


def reference(attn: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The module's formula; for float64 inputs nothing but the activations' codes is rounded."""
    y = fp8_linear(attn.flatten(1), w, w_scale)
    return (residual.to(y.dtype) + y.to(residual.dtype)).to(residual.dtype)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add for every token and weight."""
    size = spec_bytes(*input_specs(shape), *output_specs(shape))
    return Cost(bytes=size, flops=2 * shape["T"] * shape["N"] * shape["heads"] * BLOCK, unit="fp8")
