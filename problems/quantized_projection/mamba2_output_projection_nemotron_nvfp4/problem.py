"""Gated group RMSNorm of a Mamba-2 mixer and its output projection with an NVFP4 weight (Nemotron-3-Nano).

T tokens, K inner channels in n_groups groups of K / n_groups, N output channels.

Inputs, contiguous and row-major:
  y             [T, K]     bfloat16       the state space's output
  z             [T, K]     bfloat16       its gate
  norm_w        [K]        bfloat16
  w_out_packed  [N, K/2]   uint8          weight, NVFP4: output channels by input channels
  w_out_scale   [N, K/16]  float8_e4m3fn
  w_out_gscale  [1]        float32
  n_groups      int

Output, contiguous and row-major:
  out           [T, N]     bfloat16

NVFP4: byte j of a row of packed holds element 2 j in bits 0 to 3 and element 2 j + 1 in bits 4 to 7. A code has its
sign in bit 3; codes 0 ... 7 have the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. scale is plain row-major, one for 16
consecutive elements of a row. Element [n, k] is code * scale[n, k // 16] * gscale.

In float32, for every token t, and group G of consecutive channels k:
  u[k] = y[t, k] * z[t, k] / (1 + exp(-z[t, k]))
  m[k] = bfloat16(u[k] / sqrt(mean over k in G of u[k]^2 + 1e-5) * norm_w[k])
and with all groups side by side:
  out[t, n] = bfloat16(sum_k m[k] * w_out[n, k])

Numerics: the mean and the sums are accumulated in float32; rounding is to nearest even. Dividing a group's partial sum
by its root instead of every channel, after rounding u[k] * norm_w[k] to bfloat16, is within the tolerance. A code times
its scale is exact in bfloat16; gscale times that is not.

Rules:
- The gate is applied before the norm; the mean runs over a group, not over the row.
- K / n_groups is a multiple of 16; T is any positive number.
- Tokens may be so small that the 1e-5 is larger than the mean. A gate of -30 makes a token's u as small as 1e-12; its
  out must still be right relative to itself.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.quantized_projection.common import draw_fp4_weight, fp4_linear, fp4_specs, spec_bytes

TITLE = "Gated group RMSNorm and output projection with an NVFP4 weight"
NUMBER = 60
MODEL = "Nemotron-3-Nano-30B-A3B"
INPUTS = ("y", "z", "norm_w", "w_out_packed", "w_out_scale", "w_out_gscale", "n_groups")
OUTPUTS = ("out",)
HOST_VISIBLE = ()
EPS = 1e-5
QUIET, CLOSED = 1e-3, -30.0
WORKLOADS = {
    "full": {"T": 4096, "K": 4096, "n_groups": 8, "N": 2688, "quiet": 64, "closed": 1},
    "small": {"T": 8, "K": 128, "n_groups": 4, "N": 64, "quiet": 2, "closed": 1},
    "heldout": [
        {"T": 3, "K": 4096, "n_groups": 8, "N": 2688},
        {"T": 2047, "K": 4096, "n_groups": 8, "N": 2688, "quiet": 1023, "closed": 1},
        {"T": 5, "K": 240, "n_groups": 5, "N": 80, "quiet": 2, "closed": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    rows = (shape["T"], shape["K"]), torch.bfloat16
    return rows, rows, ((shape["K"],), torch.bfloat16), *fp4_specs(shape["N"], shape["K"]), shape["n_groups"]


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["T"], shape["N"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | int, ...]:
    """Normal activations and a norm weight around 1, in ``INPUTS``' order.

    At random places, ``quiet`` tokens of y are scaled by 1e-3, and ``closed`` others have a gate of -30 throughout.
    """
    tokens, width = shape["T"], shape["K"]
    y, z = (normal(generator, tokens, width) for _ in range(2))
    norm_w = normal(generator, width, dtype=torch.bfloat16, scale=0.1, mean=1.0)
    counts = [shape.get("quiet", 0), shape.get("closed", 0)]
    quiet, closed = permutation(generator, tokens)[: sum(counts)].split(counts)
    y[quiet] *= QUIET
    z[closed] = CLOSED
    weight = draw_fp4_weight(generator, shape["N"], width)
    return y.bfloat16(), z.bfloat16(), norm_w, *weight, shape["n_groups"]


def reference(
    y: torch.Tensor,
    z: torch.Tensor,
    norm_w: torch.Tensor,
    w_out_packed: torch.Tensor,
    w_out_scale: torch.Tensor,
    w_out_gscale: torch.Tensor,
    n_groups: int,
) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64, without rounding on the way."""
    wide = torch.promote_types(y.dtype, torch.float32)
    u = (y.to(wide) * silu(z.to(wide))).unflatten(-1, (n_groups, -1))
    normed = (u * torch.rsqrt(u.square().mean(dim=-1, keepdim=True) + EPS)).flatten(-2)
    m = (normed * norm_w.to(wide)).to(y.dtype).to(wide)
    return fp4_linear(m, w_out_packed, w_out_scale, w_out_gscale).to(y.dtype)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add for every token and weight."""
    size = spec_bytes(*input_specs(shape)[:-1], *output_specs(shape))
    return Cost(bytes=size, flops=2 * shape["T"] * shape["K"] * shape["N"], unit="bf16")
