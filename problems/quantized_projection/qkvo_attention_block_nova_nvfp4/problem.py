"""Attention block with NVFP4 weights and NVFP4 inputs: fused QKV projection, full attention, output projection (NOVA).

B sequences of N tokens with D channels; num_heads heads of d = D / num_heads channels.

Inputs, contiguous and row-major:
  x_packed      [B, N, D/2]   uint8          the tokens, NVFP4
  x_scale       [B, N, D/16]  float8_e4m3fn
  x_gscale      [1]           float32
  w_qkv_packed  [3 D, D/2]    uint8          weight of queries, keys and values, NVFP4: output by input channels
  w_qkv_scale   [3 D, D/16]   float8_e4m3fn
  w_qkv_gscale  [1]           float32
  b_qkv         [3 D]         bfloat16
  w_o_packed    [D, D/2]      uint8          weight of the output projection, NVFP4
  w_o_scale     [D, D/16]     float8_e4m3fn
  w_o_gscale    [1]           float32
  b_o           [D]           bfloat16
  num_heads     int

Output, contiguous and row-major:
  out           [B, N, D]     bfloat16

NVFP4: byte j of a row of packed holds element 2 j in bits 0 to 3 and element 2 j + 1 in bits 4 to 7. A code has its
sign in bit 3; codes 0 ... 7 have the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. scale is plain row-major, one for 16
consecutive elements of a row. Element [..., k] is code * scale[..., k // 16] * gscale.

In float32, rounding to bfloat16 where it says so, for every sequence and token i:
  qkv[i, n] = bfloat16(sum_k x[i, k] * w_qkv[n, k] + b_qkv[n])
  columns 0 ... D - 1 of qkv are q, D ... 2 D - 1 are k, 2 D ... 3 D - 1 are v; head h has columns h d ... (h + 1) d - 1
  of each. For every head:
  p[i, j] = softmax over all N keys j of dot(q[i], k[j]) / sqrt(d)
  a[i]    = bfloat16(sum_j bfloat16(p[i, j]) * v[j])
and with the heads side by side again:
  out[i, n] = bfloat16(sum_k a[i, k] * w_o[n, k] + b_o[n])

Numerics: products and sums are accumulated in float32, the softmax subtracts its maximum; rounding is to nearest even.
Unnormalised probabilities rounded to bfloat16, divided by their sum later, are within the tolerance. A code times its
scale is exact in bfloat16; that times gscale is not.

Rules:
- Every query sees every key of its sequence, and no other: there is no mask, no rotary embedding, no norm.
- D is a multiple of 16 and of num_heads; N is any positive number.
- A token may be all zero with scale 0.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.quantized_projection.common import (
    draw_fp4_weight,
    fp4_linear,
    fp4_of,
    fp4_specs,
    fp4_values,
    spec_bytes,
)

TITLE = "QKV projection, full attention and output projection in NVFP4"
NUMBER = 57
MODEL = "NOVA d48w1024"
INPUTS = (
    "x_packed", "x_scale", "x_gscale", "w_qkv_packed", "w_qkv_scale", "w_qkv_gscale", "b_qkv", "w_o_packed",
    "w_o_scale", "w_o_gscale", "b_o", "num_heads",
)  # fmt: skip
OUTPUTS = ("out",)
HOST_VISIBLE = ()
GAIN = 2.0
WORKLOADS = {
    "full": {"B": 2, "N": 1696, "D": 1024, "num_heads": 16, "zero_tokens": 2},
    "small": {"B": 1, "N": 24, "D": 64, "num_heads": 4, "zero_tokens": 1},
    "heldout": [
        {"B": 1, "N": 1, "D": 1024, "num_heads": 16},
        {"B": 3, "N": 333, "D": 1024, "num_heads": 16},
        {"B": 2, "N": 37, "D": 48, "num_heads": 3, "zero_tokens": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    width = shape["D"]
    return (
        *fp4_specs(shape["B"], shape["N"], width),
        *fp4_specs(3 * width, width),
        ((3 * width,), torch.bfloat16),
        *fp4_specs(width, width),
        ((width,), torch.bfloat16),
        shape["num_heads"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["N"], shape["D"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | int, ...]:
    """Normal tokens, ``zero_tokens`` of them 0, and weights that make logits of deviation 4; in ``INPUTS``' order."""
    batch, tokens, width = shape["B"], shape["N"], shape["D"]
    x = normal(generator, batch, tokens, width)
    x.view(-1, width)[permutation(generator, batch * tokens)[: shape.get("zero_tokens", 0)]] = 0.0
    w_qkv = normal(generator, 3 * width, width, scale=width**-0.5)
    w_qkv[: 2 * width] *= GAIN
    b_qkv, b_o = (normal(generator, rows, dtype=torch.bfloat16, scale=0.1) for rows in (3 * width, width))
    w_o = draw_fp4_weight(generator, width, width)
    return *fp4_of(x), *fp4_of(w_qkv), b_qkv, *w_o, b_o, shape["num_heads"]


def reference(
    x_packed: torch.Tensor,
    x_scale: torch.Tensor,
    x_gscale: torch.Tensor,
    w_qkv_packed: torch.Tensor,
    w_qkv_scale: torch.Tensor,
    w_qkv_gscale: torch.Tensor,
    b_qkv: torch.Tensor,
    w_o_packed: torch.Tensor,
    w_o_scale: torch.Tensor,
    w_o_gscale: torch.Tensor,
    b_o: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """The module's formula; float64 biases make it a float64 computation without rounding on the way."""
    dtype, wide = b_qkv.dtype, torch.promote_types(b_qkv.dtype, torch.float32)
    x = fp4_values(x_packed, x_scale, wide)
    factor = x_gscale.to(wide) * w_qkv_gscale.to(wide)
    qkv = (fp4_linear(x, w_qkv_packed, w_qkv_scale, factor) + b_qkv.to(wide)).to(dtype).to(wide)
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
    a = (p.to(dtype).to(wide) @ v).to(dtype).to(wide).transpose(1, 2).flatten(2)
    return (fp4_linear(a, w_o_packed, w_o_scale, w_o_gscale) + b_o.to(wide)).to(dtype)


def COST(shape: Shape) -> Cost:
    """Every tensor once; multiply-adds of both projections and of the attention."""
    batch, tokens, width = shape["B"], shape["N"], shape["D"]
    flops = 8 * batch * tokens * width**2 + 4 * batch * tokens**2 * width
    return Cost(bytes=spec_bytes(*input_specs(shape)[:-1], *output_specs(shape)), flops=flops, unit="bf16")
