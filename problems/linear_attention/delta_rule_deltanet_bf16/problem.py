"""Delta rule without decay from an initial state, queries and keys normalised inside (DeltaNet).

B sequences, H heads, T tokens, D channels of keys and values; heads come before tokens.

Inputs, contiguous and row-major:
  q              [B, H, T, D]  bfloat16  queries, not normalised
  k              [B, H, T, D]  bfloat16  keys, not normalised
  v              [B, H, T, D]  bfloat16  values
  beta           [B, H, T]     bfloat16  strength of the update, in [0, 1]
  initial_state  [B, H, D, D]  float32   key channel first, value channel last

Outputs, a tuple in this order, contiguous and row-major:
  o              [B, H, T, D]  bfloat16
  final_state    [B, H, D, D]  bfloat16  key channel first, value channel last

With q_t, k_t, v_t, beta_t those of token t of sequence b and head h, S = initial_state[b, h] before the first token,
and for t = 0, 1, ..., T - 1:
  qn = q_t / max(|q_t|, 1e-12) / sqrt(D)            |x| is the Euclidean norm
  kn = k_t / max(|k_t|, 1e-12)
  S  = S + outer(kn, beta_t (v_t - kn^T S))         what the state predicts for kn is corrected
  o[b, h, t] = bfloat16(qn^T S)                     read after the update
and final_state[b, h] = bfloat16(S) after the last token.

Numerics: inputs are widened exactly; the recurrence runs in float32 and both outputs are rounded once, to nearest even.
Any order of evaluation that equals the recurrence is allowed, tokens taken in groups included, and so are products of
operands rounded to bfloat16 with sums in float32. Nothing decays, so neither do errors in how the corrections of a
group's tokens depend on each other.

Rules:
- Rows of q and k may be zero: they stay zero, and a zero key leaves the state as it is.
- B and T are any positive numbers, T need not be a multiple of anything.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.linear_attention.common import (
    chunk_delta_rule,
    delta_rule_scale,
    row_allowance,
    state_allowance,
    unit,
)

TITLE = "Delta rule without decay, 16 heads of 128"
NUMBER = 74
MODEL = "DeltaNet"
INPUTS = ("q", "k", "v", "beta", "initial_state")
OUTPUTS = ("o", "final_state")
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 8, "H": 16, "T": 256, "D": 128, "zero_tokens": 16},
    "small": {"B": 1, "H": 2, "T": 40, "D": 32, "zero_tokens": 1},
    "heldout": [
        {"B": 2, "H": 16, "T": 333, "D": 128, "zero_tokens": 4},
        {"B": 1, "H": 3, "T": 1, "D": 128},
        {"B": 2, "H": 3, "T": 67, "D": 32, "zero_tokens": 2},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, dim = (shape["B"], shape["H"], shape["T"]), shape["D"]
    row = (*tokens, dim), torch.bfloat16
    return row, row, row, (tokens, torch.bfloat16), ((*tokens[:2], dim, dim), torch.float32)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    row, _, _, _, (state, _) = input_specs(shape)
    return row, (state, torch.bfloat16)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal q, k, v and state, beta the sigmoid of a normal, in ``INPUTS``' order.

    At random places, ``zero_tokens`` rows of q and as many of k, of any sequence and head, are zero.
    """
    tokens, dim = (shape["B"], shape["H"], shape["T"]), shape["D"]
    q, k, v = (normal(generator, *tokens, dim, dtype=torch.bfloat16) for _ in range(3))
    beta = normal(generator, *tokens).sigmoid().bfloat16()
    count = shape.get("zero_tokens", 0)
    for rows in (q.flatten(0, 2), k.flatten(0, 2)):
        rows[permutation(generator, len(rows))[:count]] = 0
    return q, k, v, beta, normal(generator, *tokens[:2], dim, dim)


def prepared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The arguments of the gated delta rule: wide, normalised and scaled, without decay."""
    wide = torch.promote_types(q.dtype, torch.float32)
    strength = beta.to(wide)
    queries, keys = unit(q.to(wide)) * q.shape[-1] ** -0.5, unit(k.to(wide))
    return queries, keys, v.to(wide), torch.zeros_like(strength), strength, initial_state.to(wide)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula, 64 tokens at a time; float64 inputs are computed in float64."""
    o, state = chunk_delta_rule(*prepared(q, k, v, beta, initial_state))
    return o.to(v.dtype).contiguous(), state.to(v.dtype)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but rows of o that are small by chance are measured by what such a row has on average:
    normalised queries and keys may be rounded to bfloat16.
    """
    if name == "final_state":
        return state_allowance(anchor)
    return row_allowance(anchor, delta_rule_scale(*prepared(*(x.double() for x in inputs))))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; operations of a form that takes at most 64 tokens at a time."""
    heads, dim, chunk = shape["B"] * shape["H"], shape["D"], min(64, shape["T"])
    tokens = heads * shape["T"]
    flops = tokens * (10 * chunk * dim + 6 * dim**2 + chunk**2)
    return Cost(tokens * (8 * dim + 2) + 6 * heads * dim**2, flops, "bf16")
