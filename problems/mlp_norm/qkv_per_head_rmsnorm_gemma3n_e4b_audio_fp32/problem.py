"""Query, key and value projections with RMSNorm per head (Gemma-3n E4B's text attention, on audio tokens).

B sequences of S tokens, D channels; heads of d channels, Hq for queries, Hkv for keys and for values.

Inputs, contiguous and row-major:
  x       [B, S, D]       float32
  wq      [Hq d, D]       float32  [out, in]; head h has rows h d to (h + 1) d - 1
  wk      [Hkv d, D]      float32  likewise
  wv      [Hkv d, D]      float32  likewise
  q_norm  [d]             float32  norm weight of the queries, shared by their heads
  k_norm  [d]             float32  norm weight of the keys, shared by their heads

Outputs, a tuple in this order, contiguous and row-major:
  q       [B, S, Hq, d]   float32
  k       [B, S, Hkv, d]  float32
  v       [B, S, Hkv, d]  float32

For every token and head, with means over the d channels of that head:
  q0 = wq[head] x[b, s],  q = q0 / sqrt(mean(q0^2) + 1e-6) * q_norm
  k0 = wk[head] x[b, s],  k = k0 / sqrt(mean(k0^2) + 1e-6) * k_norm
  v0 = wv[head] x[b, s],  v = v0 / sqrt(mean(v0^2) + 1e-6)

Values are normalised, too, but have no weight. Weights multiply as they are (not 1 + weight).

Numerics: everything is in float32. Products whose operands are rounded to TF32 (to nearest), accumulated in float32,
are within the tolerance; operands rounded to bfloat16 are not. Tokens may be zero (all their outputs are 0 then) or
very small, so the 1e-6 matters.

B, S, Hq and Hkv are any positive numbers, Hq a multiple of Hkv; D and d are multiples of 16. d is the length of q_norm,
Hq and Hkv follow from the weights' sizes. The inputs are not changed; every output is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import fp32_gemm_allowance

TITLE = "Query, key and value projections with RMSNorm per head"
NUMBER = 41
MODEL = "Gemma-3n E4B"
INPUTS = ("x", "wq", "wk", "wv", "q_norm", "k_norm")
OUTPUTS = ("q", "k", "v")
HOST_VISIBLE = ()
EPS = 1e-6
WORKLOADS = {
    "full": {"B": 8, "S": 512, "D": 2048, "Hq": 8, "Hkv": 2, "d": 256, "zero_tokens": 2, "small_tokens": 8},
    "small": {"B": 2, "S": 3, "D": 96, "Hq": 2, "Hkv": 1, "d": 64, "zero_tokens": 1, "small_tokens": 1},
    "heldout": [
        {"B": 1, "S": 187, "D": 2048, "Hq": 8, "Hkv": 2, "d": 256, "small_tokens": 2},
        {"B": 2, "S": 33, "D": 1536, "Hq": 8, "Hkv": 8, "d": 192, "zero_tokens": 1},
        {"B": 1, "S": 21, "D": 80, "Hq": 3, "Hkv": 1, "d": 48, "zero_tokens": 1, "small_tokens": 2},
    ],
}
allowance = fp32_gemm_allowance
"""Rows are heads: each by its own size, as their norms hide a wrong scale of the products."""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    channels, dim, heads, kv_heads = (shape[key] for key in ("D", "d", "Hq", "Hkv"))
    keys = (kv_heads * dim, channels)
    sizes = (shape["B"], shape["S"], channels), (heads * dim, channels), keys, keys, (dim,), (dim,)
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    heads = shape["Hq"], shape["Hkv"], shape["Hkv"]
    return tuple(((shape["B"], shape["S"], count, shape["d"]), torch.float32) for count in heads)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal tokens, projections that keep their scale, norm weights around 1, in ``INPUTS``' order.

    At random places, ``zero_tokens`` are 0 and ``small_tokens`` are scaled by 1e-3.
    """
    batch, length, channels, dim = (shape[key] for key in ("B", "S", "D", "d"))
    x = normal(generator, batch * length, channels)
    rows = [shape[heads] * dim for heads in ("Hq", "Hkv", "Hkv")]
    projections = [normal(generator, count, channels, scale=channels**-0.5) for count in rows]
    norms = [normal(generator, dim, scale=0.1, mean=1.0) for _ in range(2)]
    counts = [shape.get("zero_tokens", 0), shape.get("small_tokens", 0)]
    zero, small = permutation(generator, batch * length)[: sum(counts)].split(counts)
    x[zero] = 0.0
    x[small] *= 1e-3
    return x.view(batch, length, channels), *projections, *norms


def reference(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The module's formulas; float64 inputs are computed in float64."""
    return _heads(x, wq, len(q_norm)) * q_norm, _heads(x, wk, len(q_norm)) * k_norm, _heads(x, wv, len(q_norm))


def _heads(x: torch.Tensor, projection: torch.Tensor, dim: int) -> torch.Tensor:
    """Projected, split into heads and normalised, without a weight."""
    heads = torch.nn.functional.linear(x, projection).unflatten(-1, (-1, dim))
    return heads * torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + EPS)


def COST(shape: Shape) -> Cost:
    """Every input and output cross memory once; one product of width d (Hq + 2 Hkv)."""
    tokens, channels, dim = shape["B"] * shape["S"], shape["D"], shape["d"]
    width = dim * (shape["Hq"] + 2 * shape["Hkv"])
    return Cost(
        bytes=4 * (tokens * (channels + width) + channels * width + 2 * dim),
        flops=2 * tokens * channels * width,
        unit="tf32",
    )
