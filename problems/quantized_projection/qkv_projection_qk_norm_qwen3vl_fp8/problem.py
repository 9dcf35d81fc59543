"""Query, key and value projection in FP8, with RMSNorm of every query and key head (Qwen3-VL-8B text layers).

T tokens, H input channels, Hq query heads and Hk key/value heads of 128 channels; N = (Hq + 2 Hk) * 128. FP8 is e4m3
without infinities: largest 448.

Inputs, contiguous and row-major:
  x             [T, H]          bfloat16
  w_qkv         [N, H]          float8_e4m3fn  codes of the weight: Hq query, then Hk key, then Hk value heads
  w_scale       [N/128, H/128]  float32        its scales, one for 128 x 128 codes
  q_norm_w      [128]           bfloat16       weight of the norm of queries, shared by all heads
  k_norm_w      [128]           bfloat16       weight of the norm of keys, shared by all heads
  num_q_heads   int                            Hq
  num_kv_heads  int                            Hk

Outputs, a tuple in this order, contiguous and row-major:
  q             [T, Hq, 128]    bfloat16
  k             [T, Hk, 128]    bfloat16
  v             [T, Hk, 128]    bfloat16

The activations are quantised first. For every token t and block b of 128 channels j = 128 b ... 128 b + 127, in
float32:
  s[t, b] = max(max_j |x[t, j]|, 1e-10) / 448
  c[t, j] = e4m3(clamp(x[t, j] / s[t, b], -448, 448))       nearest, ties to even
Then, in float32, for every head h of the Hq + 2 Hk in w_qkv and channel d of it:
  z[t, h, d] = sum_b s[t, b] * w_scale[h, b] * sum_{j in b} c[t, j] * w_qkv[128 h + d, j]
  query and key heads:  r = 1 / sqrt(mean_d(z[t, h, d]^2) + 1e-6),  result = bfloat16(z[t, h, d] * r * norm_w[d])
  value heads:          result = bfloat16(z[t, h, d])

Numerics: divisions of the quantiser are true float32 divisions; sums are accumulated in float32; z is not rounded
before the norm, whose result is rounded once, to nearest even. The norm's weight is widened to float32.

Rules:
- H is a multiple of 128; T is any positive number. There is no rotary embedding here.
- A token may be all zero: then its q, k and v are 0. It may be so small that the 1e-6 matters, or the 1e-10 does. A
  token may hold single elements far larger than the rest.
- w_qkv holds no NaN.
- The inputs are not changed; each output is a new tensor.
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

TITLE = "QKV projection with block FP8 weights and dynamic FP8 activations, RMSNorm of query and key heads"
NUMBER = 54
MODEL = "Qwen3-VL-8B"
INPUTS = ("x", "w_qkv", "w_scale", "q_norm_w", "k_norm_w", "num_q_heads", "num_kv_heads")
OUTPUTS = ("q", "k", "v")
HOST_VISIBLE = ()
EPS = 1e-6
ROWS = {"outliers": 0.01, "row_factors": [0.0, 2.0**-11, 2.0**-31, 2.0**-40]}
WORKLOADS = {
    "full": {"T": 4096, "H": 4096, "Hq": 32, "Hk": 8, **ROWS},
    "small": {"T": 8, "H": 256, "Hq": 2, "Hk": 1, **ROWS},
    "heldout": [
        {"T": 1, "H": 4096, "Hq": 32, "Hk": 8},
        {"T": 1500, "H": 4096, "Hq": 32, "Hk": 8, **ROWS},
        {"T": 5, "H": 384, "Hq": 6, "Hk": 2, **ROWS},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    queries, keys = shape["Hq"], shape["Hk"]
    weight = (BLOCK,), torch.bfloat16
    return (
        ((shape["T"], shape["H"]), torch.bfloat16),
        *fp8_weight_specs((queries + 2 * keys) * BLOCK, shape["H"]),
        weight,
        weight,
        queries,
        keys,
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return tuple(((shape["T"], heads, BLOCK), torch.bfloat16) for heads in (shape["Hq"], shape["Hk"], shape["Hk"]))


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | int, ...]:
    """Normal activations with ``outliers`` and ``row_factors``, norm weights around 1; in ``INPUTS``' order."""
    queries, keys = shape["Hq"], shape["Hk"]
    x = draw_rows(generator, shape["T"], shape["H"], shape)
    w_qkv, w_scale = draw_fp8_weight(generator, (queries + 2 * keys) * BLOCK, shape["H"])
    norms = (normal(generator, BLOCK, dtype=torch.bfloat16, scale=0.1, mean=1.0) for _ in range(2))
    return x, w_qkv, w_scale, *norms, queries, keys


def reference(
    x: torch.Tensor,
    w_qkv: torch.Tensor,
    w_scale: torch.Tensor,
    q_norm_w: torch.Tensor,
    k_norm_w: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The module's formula; for float64 inputs nothing but the activations' codes is rounded."""
    z = fp8_linear(x, w_qkv, w_scale).unflatten(-1, (-1, BLOCK))
    q, k, v = z.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    return head_norm(q, q_norm_w).to(x.dtype), head_norm(k, k_norm_w).to(x.dtype), v.to(x.dtype, copy=True).contiguous()


def head_norm(z: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """RMSNorm over the last axis, in the type of ``z``."""
    return z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + eps) * weight.to(z.dtype)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add for every token and weight."""
    size = sum(spec_bytes(spec) for spec in (*input_specs(shape)[:-2], *output_specs(shape)))
    flops = 2 * shape["T"] * shape["H"] * (shape["Hq"] + 2 * shape["Hk"]) * BLOCK
    return Cost(bytes=size, flops=flops, unit="fp8")
