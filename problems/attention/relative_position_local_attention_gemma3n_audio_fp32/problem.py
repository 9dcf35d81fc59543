"""Local attention with relative-position logits and a tanh softcap over audio frames (Gemma 3n's audio conformer).

There are B sequences of T frames, N heads and H channels per head. A frame sees at most L frames before it, itself and
R frames after it.

Inputs, contiguous and row-major:
  q              [B, T, N, H]      float32  projected queries
  k              [B, T, N, H]      float32  projected keys
  v              [B, T, N, H]      float32  projected values
  per_dim_scale  [H]               float32  of the queries, one number per channel for all heads, before softplus
  rel_emb        [L + R + 1, N, H] float32  projected position embeddings by offset, the oldest frame first
  mask           [B, T]            bool     True where a frame is padding
  left           int                        L >= 0
  right          int                        R >= 0
  softcap        float                      c > 0 in c tanh(x / c)

Output, contiguous and row-major:
  context        [B, T, N, H]      float32

For every sequence b, head n and query frame i, with softplus(x) = log(1 + exp(x)):
  u = q[b, i, n] * softplus(per_dim_scale) * H^-0.5 / ln 2
  key frame j is visible if i - L <= j <= i + R, 0 <= j < T and not mask[b, j]
  l_j = dot(u, k[b, j, n]) + dot(u, rel_emb[j - i + L, n])
  z_j = softcap * tanh(l_j / softcap)
  context[b, i, n] = sum over visible j of p_j v[b, j, n], with p the softmax of z over the visible j
A frame that sees no key has context 0, not NaN.

Numerics: everything is in float32 and accumulated in float32. Products of tensor cores with operands rounded to TF32
are within the tolerance.

Rules:
- The softcap comes before the mask: invisible frames take no part in the softmax.
- mask[b, i] hides frame i as a key only; its own context is computed as any other.
- Padding is mostly at the end of a sequence, but there may be masked frames anywhere, and sequences of padding alone.
- H and N need not be powers of two.
- The inputs are not changed; context is a new tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.attention.common import tf32_allowance
from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, uniform

TITLE = "Local attention with relative positions and softcap over audio frames"
NUMBER = 12
MODEL = "Gemma-3n audio encoder"
INPUTS = ("q", "k", "v", "per_dim_scale", "rel_emb", "mask", "left", "right", "softcap")
OUTPUTS = ("context",)
HOST_VISIBLE = ()
# "lengths": frames before the padding; "holes": the share of masked frames among them.
MODEL_BAND = {"left": 12, "right": 0, "softcap": 50.0}
WORKLOADS = {
    "full": MODEL_BAND
    | {"T": 750, "N": 8, "H": 192, "lengths": [750, 750, 600, 451, 333, 250, 100, 12], "holes": 0.02},
    "small": MODEL_BAND | {"T": 27, "N": 2, "H": 192, "lengths": [27, 9], "holes": 0.1},
    "heldout": [
        {"T": 187, "N": 8, "H": 192, "left": 8, "right": 4, "softcap": 20.0, "lengths": [187, 100, 0], "holes": 0.0},
        {"T": 1001, "N": 4, "H": 64, "left": 31, "right": 3, "softcap": 50.0, "lengths": [1001, 1001], "holes": 0.3},
        {"T": 41, "N": 3, "H": 40, "left": 3, "right": 2, "softcap": 5.0, "lengths": [41, 5, 17], "holes": 0.2},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    batch, frames, heads, dim = len(shape["lengths"]), shape["T"], shape["N"], shape["H"]
    left, right = shape["left"], shape["right"]
    rows = (batch, frames, heads, dim), torch.float32
    scale, embedding = ((dim,), torch.float32), ((left + right + 1, heads, dim), torch.float32)
    return rows, rows, rows, scale, embedding, ((batch, frames), torch.bool), left, right, shape["softcap"]


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return input_specs(shape)[:1]


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | int | float, ...]:
    """Normal tensors (queries with deviation 6, so that the softcap matters), padding and holes in the mask."""
    rows, _, _, scale, embedding, (mask_size, _), *scalars = input_specs(shape)
    q = normal(generator, *rows[0], scale=6.0)
    k, v = (normal(generator, *rows[0]) for _ in range(2))
    per_dim_scale = normal(generator, *scale[0], scale=0.5)
    rel_emb = normal(generator, *embedding[0], scale=0.7)
    lengths = torch.tensor(shape["lengths"], device=generator.device)[:, None]
    padding = torch.arange(shape["T"], device=generator.device) >= lengths
    return q, k, v, per_dim_scale, rel_emb, padding | (uniform(generator, *mask_size) < shape["holes"]), *scalars


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    per_dim_scale: torch.Tensor,
    rel_emb: torch.Tensor,
    mask: torch.Tensor,
    left: int,
    right: int,
    softcap: float,
) -> torch.Tensor:
    """The module's formula on the band of L + R + 1 frames of every query, in the inputs' type."""
    span = left + right + 1

    def band(x: torch.Tensor, value: float) -> torch.Tensor:
        """[B, T, ..., span]: what the queries see of [B, T, ...], ``value`` outside the sequence."""
        width = [0, 0] * (x.dim() - 2) + [left, right]
        return torch.nn.functional.pad(x, width, value=value).unfold(1, span, 1)

    queries = q * torch.nn.functional.softplus(per_dim_scale) * (q.shape[-1] ** -0.5 / math.log(2))
    logits = torch.einsum("btnh,btnhf->btnf", queries, band(k, 0.0)) + torch.einsum("btnh,fnh->btnf", queries, rel_emb)
    hidden = band(mask, True)[:, :, None]
    capped = (softcap * torch.tanh(logits / softcap)).masked_fill(hidden, -torch.inf)
    # Rows without a visible key are NaN before this.
    p = capped.softmax(dim=-1).masked_fill(hidden, 0.0)
    return torch.einsum("btnf,btnhf->btnh", p, band(v, 0.0)).contiguous()


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """1e-2 of the output's size for nearly all elements, which admits TF32; 0 where no key is visible."""
    return tf32_allowance(anchor, zeros=True)


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; three products over the band."""
    batch, frames, heads, dim = len(shape["lengths"]), shape["T"], shape["N"], shape["H"]
    span = shape["left"] + shape["right"] + 1
    moved = 16 * batch * frames * heads * dim + 4 * span * heads * dim + 4 * dim + batch * frames
    return Cost(bytes=moved, flops=6 * batch * frames * heads * dim * span, unit="tf32")
