"""Vision patch merger with NVFP4 weights, its tokens placed into a sequence of text embeddings (Qwen3-VL-8B).

Four patches of Dv channels become one visual token of K = 4 Dv channels, and that a text token of Ho channels. There
are Nv visual tokens and S positions.

Inputs, contiguous and row-major:
  patches      [4 Nv, Dv]   bfloat16       rows 4 i ... 4 i + 3 belong to visual token i
  ln_w         [Dv]         bfloat16       weight and bias of the norm
  ln_b         [Dv]         bfloat16
  w1_packed    [K, K/2]     uint8          first weight, NVFP4: output channels by input channels
  w1_scale     [K, K/16]    float8_e4m3fn
  w1_gscale    [1]          float32
  b1           [K]          bfloat16
  w2_packed    [Ho, K/2]    uint8          second weight, NVFP4
  w2_scale     [Ho, K/16]   float8_e4m3fn
  w2_gscale    [1]          float32
  b2           [Ho]         bfloat16
  text_embeds  [S, Ho]      bfloat16
  positions    [Nv]         int32          where visual tokens go: in [0, S), strictly increasing

Output, contiguous and row-major:
  embeds       [S, Ho]      bfloat16

NVFP4: byte j of a row of packed holds element 2 j in bits 0 to 3 and element 2 j + 1 in bits 4 to 7. A code has its
sign in bit 3; codes 0 ... 7 have the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. scale is plain row-major, one for 16
consecutive elements of a row. Element [n, k] is code * scale[n, k // 16] * gscale.

In float32, rounding to bfloat16 where it says so, for every row p of patches and every visual token i:
  norm[p] = bfloat16((patches[p] - mean) / sqrt(var + 1e-6) * ln_w + ln_b)       mean and var over the Dv channels
  m[i]    = norm[4 i], norm[4 i + 1], norm[4 i + 2], norm[4 i + 3], one after the other: K channels
  h[i, n] = bfloat16(gelu(sum_k m[i, k] * w1[n, k] + b1[n])),   gelu(a) = a / 2 * (1 + erf(a / sqrt(2)))
  y[i, n] = bfloat16(sum_k h[i, k] * w2[n, k] + b2[n])
  embeds[positions[i]] = y[i]; every other row of embeds is that of text_embeds, bit by bit

Numerics: var is the biased variance; sums are accumulated in float32; all rounding is to nearest even. A code times its
scale is exact in bfloat16; gscale times that is not.

Rules:
- Dv is a multiple of 4. Nv is at least 1 and at most S; positions may fill all of S.
- The inputs are not changed; embeds is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal, uniform
from mkb_env.problems.quantized_projection.common import draw_fp4_weight, fp4_linear, fp4_specs, spec_bytes

TITLE = "Vision patch merger (LayerNorm, two NVFP4 linears, GELU) placed into text embeddings"
NUMBER = 55
MODEL = "Qwen3-VL-8B"
INPUTS = (
    "patches", "ln_w", "ln_b", "w1_packed", "w1_scale", "w1_gscale", "b1", "w2_packed", "w2_scale", "w2_gscale",
    "b2", "text_embeds", "positions",
)  # fmt: skip
OUTPUTS = ("embeds",)
HOST_VISIBLE = ()
EPS = 1e-6
WORKLOADS = {
    "full": {"images": [1024, 576, 256, 192], "S": 4096, "Dv": 1152, "Ho": 4096},
    "small": {"images": [1, 3, 2], "S": 10, "Dv": 32, "Ho": 64},
    "heldout": [
        {"images": [300, 33], "S": 400, "Dv": 1152, "Ho": 4096},
        {"images": [1], "S": 1, "Dv": 144, "Ho": 272},
        {"images": [5, 8], "S": 13, "Dv": 36, "Ho": 80},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, width, out = sum(shape["images"]), shape["Dv"], shape["Ho"]
    vector = (width,), torch.bfloat16
    return (
        ((4 * tokens, width), torch.bfloat16),
        vector,
        vector,
        *fp4_specs(4 * width, 4 * width),
        ((4 * width,), torch.bfloat16),
        *fp4_specs(out, 4 * width),
        ((out,), torch.bfloat16),
        ((shape["S"], out), torch.bfloat16),
        ((tokens,), torch.int32),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["S"], shape["Ho"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Patches of various means and deviations, and images at random places in order; in ``INPUTS``' order."""
    tokens, width, out = sum(shape["images"]), shape["Dv"], shape["Ho"]
    patches = normal(generator, 4 * tokens, width)
    patches *= torch.exp2(uniform(generator, 4 * tokens, 1, low=-1, high=1))
    patches += normal(generator, 4 * tokens, 1)
    ln_w, ln_b = (normal(generator, width, dtype=torch.bfloat16, scale=0.1, mean=mean) for mean in (1.0, 0.0))
    w1, w2 = (draw_fp4_weight(generator, rows, 4 * width) for rows in (4 * width, out))
    b1, b2 = (normal(generator, rows, dtype=torch.bfloat16, scale=0.1) for rows in (4 * width, out))
    text_embeds = normal(generator, shape["S"], out, dtype=torch.bfloat16)
    gaps = integers(generator, len(shape["images"]), high=shape["S"] - tokens + 1).sort().values
    image = torch.tensor([i for i, length in enumerate(shape["images"]) for _ in range(length)], device=gaps.device)
    positions = torch.arange(tokens, dtype=torch.int32, device=gaps.device) + gaps[image]
    return patches.bfloat16(), ln_w, ln_b, *w1, b1, *w2, b2, text_embeds, positions


def reference(
    patches: torch.Tensor,
    ln_w: torch.Tensor,
    ln_b: torch.Tensor,
    w1_packed: torch.Tensor,
    w1_scale: torch.Tensor,
    w1_gscale: torch.Tensor,
    b1: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_gscale: torch.Tensor,
    b2: torch.Tensor,
    text_embeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64, without rounding on the way."""
    dtype, wide = patches.dtype, torch.promote_types(patches.dtype, torch.float32)
    x = patches.to(wide)
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + EPS)
    m = (normed * ln_w.to(wide) + ln_b.to(wide)).to(dtype).view(-1, 4 * patches.shape[1]).to(wide)
    h = gelu(fp4_linear(m, w1_packed, w1_scale, w1_gscale) + b1.to(wide)).to(dtype).to(wide)
    y = fp4_linear(h, w2_packed, w2_scale, w2_gscale) + b2.to(wide)
    return text_embeds.index_copy(0, positions.long(), y.to(dtype))


def COST(shape: Shape) -> Cost:
    """Every tensor once, but of ``text_embeds`` only the rows that stay; multiply-adds of both products."""
    tokens, width, out = sum(shape["images"]), shape["Dv"], shape["Ho"]
    size = spec_bytes(*input_specs(shape), *output_specs(shape)) - 2 * tokens * out
    return Cost(bytes=size, flops=2 * tokens * 4 * width * (4 * width + out), unit="bf16")
