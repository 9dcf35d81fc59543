"""Delta rule with a decay per key channel (Kimi Delta Attention), queries and keys normalised inside.

B sequences of T tokens, H query/key heads, Hv value heads (a multiple of H), K channels of a key and V of a value.

Inputs, contiguous and row-major:
  q     [B, T, H, K]   bfloat16  queries, not normalised
  k     [B, T, H, K]   bfloat16  keys, not normalised
  v     [B, T, Hv, V]  bfloat16  values
  g     [B, T, Hv, K]  bfloat16  logarithm of each key channel's decay, from -5 to 0
  beta  [B, T, Hv]     bfloat16  strength of the update, in [0, 1]

Output, contiguous and row-major:
  o     [B, T, Hv, V]  bfloat16

Value head h uses query/key head h // (Hv / H). With q_t, k_t, v_t, g_t, beta_t those of token t of sequence b and
head h, S a K x V matrix that is 0 before the first token, and for t = 0, 1, ..., T - 1:
  qn = q_t / max(|q_t|, 1e-12) / sqrt(K)            |x| is the Euclidean norm
  kn = k_t / max(|k_t|, 1e-12)
  S  = diag(exp(g_t)) S                             row c of S decays by exp(g_t[c]); first the decay,
  S  = S + outer(beta_t kn, v_t - kn^T S)           then what the decayed state predicts for kn is corrected
  o[b, t, h] = bfloat16(qn^T S)                     read after the update

Numerics: inputs are widened exactly; the recurrence runs in float32 and o is rounded once, to nearest even. Any order
of evaluation that equals the recurrence is allowed, tokens taken in groups included, and so are products of operands
rounded to bfloat16 with sums in float32.

Rules:
- Rows of q and k may be zero: they stay zero, and a zero key leaves the decayed state as it is.
- Up to 16 neighbouring tokens may all have g = -5 in a channel, a sum of -80; runs of such tokens are never longer,
  but a channel may have several.
- B and T are any positive numbers, T need not be a multiple of anything.
- The inputs are not changed; o is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.linear_attention.common import (
    by_head,
    channel_scale,
    chunk_channel_rule,
    row_allowance,
    strong_runs,
    unit,
)

TITLE = "Delta rule with a decay per key channel, 16 heads of 128"
NUMBER = 68
MODEL = "Kimi-Linear"
INPUTS = ("q", "k", "v", "g", "beta")
OUTPUTS = ("o",)
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 8, "T": 256, "H": 16, "Hv": 16, "K": 128, "V": 128, "zero_tokens": 16, "strong_runs": 6},
    "small": {"B": 1, "T": 80, "H": 1, "Hv": 2, "K": 32, "V": 32, "zero_tokens": 1, "strong_runs": 2},
    "heldout": [
        {"B": 2, "T": 101, "H": 4, "Hv": 8, "K": 128, "V": 128, "zero_tokens": 2, "strong_runs": 3},
        {"B": 1, "T": 1, "H": 16, "Hv": 16, "K": 128, "V": 128},
        {"B": 2, "T": 83, "H": 2, "Hv": 4, "K": 32, "V": 64, "zero_tokens": 2, "strong_runs": 2},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, heads = (shape["B"], shape["T"]), (shape["B"], shape["T"], shape["Hv"])
    key = (*tokens, shape["H"], shape["K"]), torch.bfloat16
    value, decay = (((*heads, shape[width]), torch.bfloat16) for width in "VK")
    return key, key, value, decay, (heads, torch.bfloat16)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["T"], shape["Hv"], shape["V"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal q, k and v, decays near 1, beta the sigmoid of a normal, in ``INPUTS``' order.

    At random places, ``zero_tokens`` tokens have zero queries and keys; in each sequence ``strong_runs`` runs of 16
    tokens have g = -5 in half of the channels.
    """
    tokens, heads = (shape["B"], shape["T"]), (shape["B"], shape["T"], shape["Hv"])
    q, k = (normal(generator, *tokens, shape["H"], shape["K"], dtype=torch.bfloat16) for _ in range(2))
    v = normal(generator, *heads, shape["V"], dtype=torch.bfloat16)
    g = (logsigmoid(normal(generator, *heads, shape["K"])) / 16).bfloat16()
    beta = normal(generator, *heads).sigmoid().bfloat16()
    zero = permutation(generator, shape["B"] * shape["T"])[: shape.get("zero_tokens", 0)]
    q.flatten(0, 1)[zero], k.flatten(0, 1)[zero] = 0, 0
    strong_runs(generator, g, shape.get("strong_runs", 0))
    return q, k, v, g, beta


def prepared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Wide, head first, normalised and scaled: the arguments of the delta rule but for its state."""
    wide, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    queries, keys = (unit(by_head(x.to(wide), heads)) for x in (q, k))
    values, decays, strengths = (x.to(wide).transpose(1, 2) for x in (v, g, beta))
    return queries * q.shape[-1] ** -0.5, keys, values, decays, strengths


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The module's recurrence, 16 tokens at a time; float64 inputs are computed in float64."""
    return chunk_channel_rule(*prepared(q, k, v, g, beta), chunk=16).transpose(1, 2).to(v.dtype).contiguous()


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but rows of o that are small by chance (few keys count, all nearly orthogonal to the query) are
    measured by what such a row has on average: normalised queries and keys may be rounded to bfloat16.
    """
    q, k, v, g, beta = prepared(*(x.double() for x in inputs))
    return row_allowance(anchor, channel_scale(q, k, v * beta.unsqueeze(-1), g).transpose(1, 2))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; three multiply-adds per state element and token."""
    tokens, heads, width = shape["B"] * shape["T"], shape["Hv"], shape["K"]
    moved = 2 * tokens * (2 * shape["H"] * width + heads * (2 * shape["V"] + width + 1))
    return Cost(moved, 6 * tokens * heads * width * shape["V"], "bf16")
