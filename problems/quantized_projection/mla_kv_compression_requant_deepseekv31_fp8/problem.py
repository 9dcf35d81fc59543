"""Compression of keys and values to the latent of multi-head latent attention, stored in FP8 (DeepSeek-V3.1).

An FP8 projection, RMSNorm of its first L columns (the latent), and their quantisation to FP8 with power-of-two scales;
the other 64 columns, the rotary part of the keys, stay as they are.

T tokens, H input channels, L latent channels, N = L + 64. FP8 is e4m3 without infinities: largest 448.

Inputs, contiguous and row-major:
  x          [T, H]                  bfloat16
  w_kv_a     [N, H]                  float8_e4m3fn  codes: L rows of the latent, 64 of the rotary part
  w_scale    [ceil(N/128), H/128]    float32        its scales, one for 128 x 128 codes; the last has 64 rows
  kv_norm_w  [L]                     bfloat16

Outputs, a tuple in this order, contiguous and row-major:
  kv_q       [T, L]                  float8_e4m3fn  codes of the latent
  kv_scale   [T, L/128]              float32        their scales, powers of two, one for 128 codes
  k_pe       [T, 64]                 bfloat16

The activations are quantised first. For every token t and block b of 128 channels k = 128 b ... 128 b + 127, in
float32:
  s[t, b] = max(max_k |x[t, k]|, 1e-10) / 448
  q[t, k] = e4m3(clamp(x[t, k] / s[t, b], -448, 448))
  z[t, n] = sum_b s[t, b] * w_scale[n // 128, b] * sum_{k in b} q[t, k] * w_kv_a[n, k]
Then, for every token, in float32 with rounding to bfloat16 where it says so:
  k_pe[t, j] = bfloat16(z[t, L + j])
  c[l] = bfloat16(z[t, l]),  l = 0 ... L - 1
  n[l] = bfloat16(c[l] / sqrt(mean_l(c[l]^2) + 1e-6) * kv_norm_w[l])
and for every block b of 128 latent channels l = 128 b ... 128 b + 127:
  a = max(max_l |n[l]|, 1e-4) / 448
  kv_scale[t, b] = the smallest power of two that is at least a
  kv_q[t, l] = e4m3(clamp(n[l] / kv_scale[t, b], -448, 448))

Numerics: all rounding is to nearest, ties to even; divisions by 448 and by s are true float32 divisions. Both roundings
to bfloat16 count, as codes follow: sums must be as accurate as float32 accumulation of exact products makes them. The
order of the sums moves about one code in 10^5 to a neighbour; up to one in 1000 may differ from the truth (three codes
in a small output), none by more than one step of e4m3. As many scales may differ by one power of two.

Rules:
- H and L are multiples of 128; T is any positive number.
- A token may be all zero: then its kv_q and k_pe are 0 and its scales 2^-22. It may be so small that the 1e-6 matters,
  or either floor.
- w_kv_a holds no NaN, and kv_q must hold none.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal
from mkb_env.problems.quantized_projection.common import (
    BLOCK,
    FP8_MAX,
    draw_fp8_weight,
    draw_rows,
    fp8_linear,
    fp8_round,
    fp8_rows,
    fp8_weight_specs,
    spec_bytes,
)

TITLE = "MLA down-projection in FP8, RMSNorm of the latent and its requantisation with power-of-two scales"
NUMBER = 56
MODEL = "DeepSeek-V3.1"
INPUTS = ("x", "w_kv_a", "w_scale", "kv_norm_w")
OUTPUTS = ("kv_q", "kv_scale", "k_pe")
HOST_VISIBLE = ()
ROPE = 64
EPS = 1e-6
FLOOR = 1e-4
SMALLEST_SCALE = 2.0**-22
FEW, SHARE = 3, 1e-3
ROW_FACTORS = [0.0, 2.0**-10, 2.0**-31, 2.0**-40]
WORKLOADS = {
    "full": {"T": 8192, "H": 7168, "L": 512, "row_factors": ROW_FACTORS},
    "small": {"T": 8, "H": 256, "L": 256, "row_factors": ROW_FACTORS},
    "heldout": [
        {"T": 1, "H": 7168, "L": 512},
        {"T": 1111, "H": 7168, "L": 512, "gains": [-3, 1], "row_factors": ROW_FACTORS},
        {"T": 5, "H": 384, "L": 128, "row_factors": ROW_FACTORS},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    weight = fp8_weight_specs(shape["L"] + ROPE, shape["H"])
    return ((shape["T"], shape["H"]), torch.bfloat16), *weight, ((shape["L"],), torch.bfloat16)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    tokens, latent = shape["T"], shape["L"]
    return (
        ((tokens, latent), torch.float8_e4m3fn),
        ((tokens, latent // BLOCK), torch.float32),
        ((tokens, ROPE), torch.bfloat16),
    )


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal activations, rows times ``gains`` and ``row_factors``, a norm weight around 1; in ``INPUTS``' order."""
    x = draw_rows(generator, shape["T"], shape["H"], shape)
    weight = draw_fp8_weight(generator, shape["L"] + ROPE, shape["H"])
    return x, *weight, normal(generator, shape["L"], dtype=torch.bfloat16, scale=0.1, mean=1.0)


def reference(
    x: torch.Tensor, w_kv_a: torch.Tensor, w_scale: torch.Tensor, kv_norm_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The module's formula."""
    z = fp8_linear(x, w_kv_a, w_scale)
    latent, k_pe = z.split([len(kv_norm_w), ROPE], dim=-1)
    return *requantize(latent_norm(latent.bfloat16(), kv_norm_w, z.dtype)), k_pe.bfloat16()


def anchor(
    x: torch.Tensor, w_kv_a: torch.Tensor, w_scale: torch.Tensor, kv_norm_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formula in float64, with the roundings that decide on codes; the codes' numbers in float64, too."""
    z = fp8_linear(x.double(), w_kv_a, w_scale)
    latent, k_pe = z.split([len(kv_norm_w), ROPE], dim=-1)
    codes, scale = requantize(latent_norm(latent.bfloat16(), kv_norm_w, z.dtype))
    return codes.double(), scale.double(), k_pe.contiguous()


def latent_norm(c: torch.Tensor, weight: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """RMSNorm in ``wide``, rounded to bfloat16."""
    c = c.to(wide)
    return (c * torch.rsqrt(c.square().mean(dim=-1, keepdim=True) + EPS) * weight.to(wide)).bfloat16()


def requantize(n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, L] and power-of-two scales [T, L / 128] of bfloat16 rows [T, L]."""
    blocks = n.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(FLOOR)
    bits = (largest / torch.full_like(largest, FP8_MAX)).view(torch.int32)
    # The exponent's bits alone are the power of two at or below; the next one above unless the mantissa is 0.
    scale = (((bits >> 23) + (bits & 0x7FFFFF != 0)) << 23).view(torch.float32)
    return fp8_round(blocks / scale).flatten(-2), scale.squeeze(-1)


def decode(name: str, outputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """``kv_q`` as the numbers that codes and scales stand for, ``kv_scale`` as its exponent."""
    scale = outputs["kv_scale"]
    if name == "kv_q":
        return fp8_rows(outputs["kv_q"], scale, scale.dtype)
    return scale.log2() if name == "kv_scale" else None


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance | None:
    """One step of e4m3 for ``kv_q``, one power of two for ``kv_scale``, and but few of either differ at all.

    A code may differ where the order of a float32 sum decides how the latent is rounded to bfloat16. The general rule
    would allow three eighths of the largest number.
    """
    if name == "k_pe":
        return None
    share, none = max(SHARE, FEW / anchor.numel()), torch.full_like(anchor, 1e-5)
    if name == "kv_scale":
        return Allowance(1 + none, none, SHARE)
    blocks = anchor.unflatten(-1, (-1, BLOCK))
    # The block's scale is the power of two above its largest number / 448.
    scale = _power_above(blocks.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp_min(SMALLEST_SCALE)
    step = torch.maximum(_power_above(blocks) * 2.0**-4, scale * 2.0**-9).flatten(-2)
    return Allowance(step * (1 + 1e-6), step * 1e-6, share)


def _power_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two greater than |x|."""
    return torch.ldexp(torch.ones_like(x), x.abs().frexp().exponent)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add for every token and weight."""
    size = spec_bytes(*input_specs(shape), *output_specs(shape))
    return Cost(bytes=size, flops=2 * shape["T"] * shape["H"] * (shape["L"] + ROPE), unit="fp8")
