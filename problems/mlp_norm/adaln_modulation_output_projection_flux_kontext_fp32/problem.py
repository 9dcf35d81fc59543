"""Last layer of a diffusion transformer (FLUX.1-Kontext): LayerNorm modulated by a condition, then a projection.

B images of S tokens, D channels, O output channels.

Inputs, contiguous and row-major:
  x      [B, S, D]  float32
  temb   [B, D]     float32  the condition, one vector per image
  w_mod  [2 D, D]   float32  [out, in]
  b_mod  [2 D]      float32
  w_out  [O, D]     float32  [out, in]
  b_out  [O]        float32

Output, contiguous and row-major:
  y      [B, S, O]  float32

For every image b:
  e = w_mod (temb[b] * sigmoid(temb[b])) + b_mod
  scale = e[:D],  shift = e[D:]                                  (scale comes first)
and for every token s of it, with means over the D channels:
  mu = mean(x[b, s]),  v = mean((x[b, s] - mu)^2)
  m = (x[b, s] - mu) / sqrt(v + 1e-6) * (1 + scale) + shift
  y[b, s] = w_out m + b_out

Numerics: everything is in float32. Products with w_mod and w_out whose operands are rounded to TF32 (to nearest),
accumulated in float32, are within the tolerance; operands rounded to bfloat16 are not. Tokens may be constant (all D
channels equal: v = 0, so y[b, s] = w_out shift + b_out) or have a very small variance, so the 1e-6 matters.

B and S are any positive numbers, D and O multiples of 16. The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import fp32_gemm_allowance

TITLE = "LayerNorm modulated by a condition, and output projection"
NUMBER = 39
MODEL = "FLUX.1-Kontext"
INPUTS = ("x", "temb", "w_mod", "b_mod", "w_out", "b_out")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
EPS = 1e-6
WORKLOADS = {
    "full": {"B": 2, "S": 8192, "D": 3072, "O": 64, "constant_tokens": 2, "small_tokens": 16},
    "small": {"B": 2, "S": 5, "D": 64, "O": 16, "constant_tokens": 1, "small_tokens": 1},
    "heldout": [
        {"B": 3, "S": 1025, "D": 3072, "O": 64, "small_tokens": 2},
        {"B": 1, "S": 77, "D": 1536, "O": 64, "constant_tokens": 1},
        {"B": 3, "S": 19, "D": 208, "O": 48, "constant_tokens": 2, "small_tokens": 1},
    ],
}
allowance = fp32_gemm_allowance


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    batch, length, wide, out = (shape[key] for key in ("B", "S", "D", "O"))
    sizes = (batch, length, wide), (batch, wide), (2 * wide, wide), (2 * wide,), (out, wide), (out,)
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["S"], shape["O"]), torch.float32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal tokens and conditions, modulations of scale 0.3, in ``INPUTS``' order.

    At random places, ``constant_tokens`` are 1.5 in all channels (so that no order of summing rounds, which 1 / sqrt(
    1e-6) would magnify), ``small_tokens`` are scaled by 1e-3.
    """
    batch, length, wide, out = (shape[key] for key in ("B", "S", "D", "O"))
    x, temb = normal(generator, batch * length, wide), normal(generator, batch, wide)
    w_mod, b_mod = normal(generator, 2 * wide, wide, scale=0.5 * wide**-0.5), normal(generator, 2 * wide, scale=0.1)
    w_out, b_out = normal(generator, out, wide, scale=wide**-0.5), normal(generator, out, scale=0.1)
    counts = [shape.get("constant_tokens", 0), shape.get("small_tokens", 0)]
    constant, small = permutation(generator, batch * length)[: sum(counts)].split(counts)
    x[constant] = 1.5
    x[small] *= 1e-3
    return x.view(batch, length, wide), temb, w_mod, b_mod, w_out, b_out


def reference(
    x: torch.Tensor,
    temb: torch.Tensor,
    w_mod: torch.Tensor,
    b_mod: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    modulation = torch.nn.functional.linear(temb * torch.sigmoid(temb), w_mod, b_mod)
    scale, shift = modulation.unsqueeze(1).chunk(2, dim=-1)
    centred = x - x.mean(dim=-1, keepdim=True)
    normalised = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + EPS)
    return torch.nn.functional.linear(normalised * (1 + scale) + shift, w_out, b_out)


def COST(shape: Shape) -> Cost:
    """Every input and the output cross memory once; both products."""
    batch, length, wide, out = (shape[key] for key in ("B", "S", "D", "O"))
    tokens = batch * length
    weights = 2 * wide * wide + 2 * wide + out * wide + out
    return Cost(
        bytes=4 * (tokens * (wide + out) + batch * wide + weights),
        flops=2 * tokens * wide * out + 4 * batch * wide * wide,
        unit="tf32",
    )
