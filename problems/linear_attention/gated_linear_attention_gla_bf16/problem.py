"""Gated linear attention: a state of outer products whose key channels decay on their own (GLA).

B sequences of T tokens, H heads, K channels of a key and V of a value.

Inputs, contiguous and row-major:
  q   [B, T, H, K]  bfloat16
  k   [B, T, H, K]  bfloat16
  v   [B, T, H, V]  bfloat16
  gk  [B, T, H, K]  bfloat16  logarithm of each key channel's decay, from -5 to 0

Output, contiguous and row-major:
  o   [B, T, H, V]  bfloat16

With q_t, k_t, v_t, gk_t those of token t of sequence b and head h, S a K x V matrix that is 0 before the first token,
and for t = 0, 1, ..., T - 1:
  S = diag(exp(gk_t)) S + outer(k_t, v_t)           row c of S decays by exp(gk_t[c]), then the token is added
  o[b, t, h] = bfloat16((q_t / sqrt(K))^T S)        read after the update

Numerics: inputs are widened exactly; the recurrence runs in float32 and o is rounded once, to nearest even. Any order
of evaluation that equals the recurrence is allowed, tokens taken in groups included, and so are products of operands
rounded to bfloat16 with sums in float32.

Rules:
- Neither q nor k is normalised; the token's own key and value do not decay before they are read.
- Up to 16 neighbouring tokens may all have gk = -5 in a channel, a sum of -80; runs of such tokens are never longer,
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
from mkb_env.problems.drawing import normal
from mkb_env.problems.linear_attention.common import Four, channel_scale, chunk_channel_rule, row_allowance, strong_runs

TITLE = "Gated linear attention, 4 heads, keys of 256, values of 512"
NUMBER = 69
MODEL = "GLA"
INPUTS = ("q", "k", "v", "gk")
OUTPUTS = ("o",)
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 8, "T": 256, "H": 4, "K": 256, "V": 512, "strong_runs": 6},
    "small": {"B": 1, "T": 80, "H": 2, "K": 32, "V": 64, "strong_runs": 2},
    "heldout": [
        {"B": 3, "T": 77, "H": 4, "K": 256, "V": 512, "strong_runs": 3},
        {"B": 1, "T": 1, "H": 4, "K": 256, "V": 512},
        {"B": 2, "T": 83, "H": 3, "K": 64, "V": 32, "strong_runs": 2},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    heads = shape["B"], shape["T"], shape["H"]
    key, value = (((*heads, shape[width]), torch.bfloat16) for width in "KV")
    return key, key, value, key


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (input_specs(shape)[2],)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal q, k and v, decays near 1, in ``INPUTS``' order.

    In each sequence ``strong_runs`` runs of 16 tokens have gk = -5 in half of the channels.
    """
    heads = shape["B"], shape["T"], shape["H"]
    q, k = (normal(generator, *heads, shape["K"], dtype=torch.bfloat16) for _ in range(2))
    v = normal(generator, *heads, shape["V"], dtype=torch.bfloat16)
    gk = (logsigmoid(normal(generator, *heads, shape["K"])) / 16).bfloat16()
    strong_runs(generator, gk, shape.get("strong_runs", 0))
    return q, k, v, gk


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> Four:
    """Wide and head first, the query scaled."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, gk = (x.to(wide).transpose(1, 2) for x in (q, k, v, gk))
    return q * q.shape[-1] ** -0.5, k, v, gk


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    """The module's recurrence, 16 tokens at a time; float64 inputs are computed in float64."""
    return chunk_channel_rule(*prepared(q, k, v, gk), None, chunk=16).transpose(1, 2).to(v.dtype).contiguous()


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but rows of o that are small by chance (few keys count, all nearly orthogonal to the query) are
    measured by what such a row has on average: keys and queries may be rounded once their decay is multiplied in.
    """
    return row_allowance(anchor, channel_scale(*prepared(*(x.double() for x in inputs))).transpose(1, 2))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; two multiply-adds per state element and token."""
    rows, keys, values = shape["B"] * shape["T"] * shape["H"], shape["K"], shape["V"]
    return Cost(2 * rows * (3 * keys + 2 * values), 4 * rows * keys * values, "bf16")
