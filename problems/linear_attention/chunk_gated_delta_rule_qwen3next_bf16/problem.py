"""Gated delta rule over whole sequences, queries and keys L2-normalised inside (Qwen3-Next linear attention, prefill).

B sequences of T tokens, Hk query/key heads, Hv value heads (a multiple of Hk), Dk channels of a key and Dv of a value.

Inputs, contiguous and row-major:
  q     [B, T, Hk, Dk]  bfloat16  queries, not normalised
  k     [B, T, Hk, Dk]  bfloat16  keys, not normalised
  v     [B, T, Hv, Dv]  bfloat16  values
  g     [B, T, Hv]      float32   logarithm of the decay, at most 0
  beta  [B, T, Hv]      bfloat16  strength of the update, in [0, 1]

Outputs, a tuple in this order, contiguous and row-major:
  o            [B, T, Hv, Dv]   bfloat16
  final_state  [B, Hv, Dk, Dv]  bfloat16

Value head h uses query/key head h // (Hv / Hk). With q_t, k_t, v_t, g_t, beta_t those of token t of sequence b and
head h, S a Dk x Dv matrix that is 0 before the first token, and for t = 0, 1, ..., T - 1:
  qn = q_t / sqrt(sum(q_t^2) + 1e-6) / sqrt(Dk)
  kn = k_t / sqrt(sum(k_t^2) + 1e-6)
  S  = exp(g_t) S                                   first the decay,
  S  = S + outer(kn, beta_t (v_t - kn^T S))         then what the decayed state predicts for kn is corrected
  o[b, t, h] = bfloat16(qn^T S)                     read after the update
and final_state[b, h] = bfloat16(S) after the last token.

Numerics: inputs are widened exactly; the recurrence runs in float32 and both outputs are rounded once, to nearest even.
Any order of evaluation that equals the recurrence is allowed, tokens taken in groups included, and so are products of
operands rounded to bfloat16 with sums in float32; the state that is carried from token to token, or from group to
group, stays float32.

Rules:
- Rows of q and k may be zero or tiny; the 1e-6 matters for these.
- v may be large (1e5) and g = -15 right after it, so that a part of 1e-4 of the state would show, were it kept.
- g may be so negative that exp(g) is 0: the state is forgotten. Sums of g over many tokens reach thousands below 0.
- B and T are any positive numbers, T need not be a multiple of anything.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import softplus

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation, uniform
from mkb_env.problems.linear_attention.common import (
    Five,
    by_head,
    chunk_delta_rule,
    delta_rule_scale,
    l2n,
    row_allowance,
    state_allowance,
    step_bias,
)

TITLE = "Gated delta rule over whole sequences, 16 key heads, 32 value heads of 128"
NUMBER = 62
MODEL = "Qwen3-Next-80B-A3B"
INPUTS = ("q", "k", "v", "g", "beta")
OUTPUTS = ("o", "final_state")
HOST_VISIBLE = ()
HEADS = {"Hk": 16, "Hv": 32, "D": 128}
WORKLOADS = {
    "full": {"B": 2, "T": 2048, **HEADS, "special_tokens": 3},
    "small": {"B": 1, "T": 72, "Hk": 2, "Hv": 4, "D": 16, "special_tokens": 1},
    "heldout": [
        {"B": 3, "T": 1000, **HEADS, "special_tokens": 2},
        {"B": 1, "T": 1, **HEADS},
        {"B": 2, "T": 35, "Hk": 1, "Hv": 3, "D": 32, "special_tokens": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, (keys, values, dim) = (shape["B"], shape["T"]), (shape[name] for name in ("Hk", "Hv", "D"))
    key, gate = ((*tokens, keys, dim), torch.bfloat16), (*tokens, values)
    return key, key, ((*gate, dim), torch.bfloat16), (gate, torch.float32), (gate, torch.bfloat16)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    batch, heads, dim = shape["B"], shape["Hv"], shape["D"]
    return ((batch, shape["T"], heads, dim), torch.bfloat16), ((batch, heads, dim, dim), torch.bfloat16)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal q, k and v, decays as the model starts with, beta the sigmoid of a normal.

    At random places, ``special_tokens`` tokens each have zero queries and keys, queries and keys scaled by 1e-4, or
    g = -200; as many have values scaled by 2^14, and the next token g = -15.
    """
    tokens, (keys, values, dim) = (shape["B"], shape["T"]), (shape[name] for name in ("Hk", "Hv", "D"))
    q, k = (normal(generator, *tokens, keys, dim, dtype=torch.bfloat16) for _ in range(2))
    v = normal(generator, *tokens, values, dim, dtype=torch.bfloat16)
    rate = uniform(generator, values, low=1.0, high=16.0)
    g = -rate * softplus(normal(generator, *tokens, values) + step_bias(generator, values))
    beta = normal(generator, *tokens, values).sigmoid().bfloat16()
    count = shape.get("special_tokens", 0)
    pairs = 2 * permutation(generator, shape["B"] * shape["T"] // 2)[: 4 * count].view(4, count)
    zero, tiny, reset, loud = pairs.unbind()
    for rows in (q.flatten(0, 1), k.flatten(0, 1)):
        rows[zero] = 0
        rows[tiny] *= 1e-4
    g.flatten(0, 1)[reset] = -200
    v.flatten(0, 1)[loud] *= 2.0**14
    g.flatten(0, 1)[loud + 1] = -15
    return q, k, v, g, beta


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Five:
    """Wide, head first, normalised and scaled: the arguments of the delta rule but for its state."""
    wide, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    queries = l2n(by_head(q.to(wide), heads)) * q.shape[-1] ** -0.5
    keys = l2n(by_head(k.to(wide), heads))
    return queries, keys, v.to(wide).transpose(1, 2), g.to(wide).transpose(1, 2), beta.to(wide).transpose(1, 2)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula, 64 tokens at a time; float64 inputs are computed in float64."""
    heads = prepared(q, k, v, g, beta)
    state = heads[0].new_zeros(len(q), v.shape[2], q.shape[-1], v.shape[-1])
    o, state = chunk_delta_rule(*heads, state)
    return o.transpose(1, 2).to(v.dtype).contiguous(), state.to(v.dtype)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but rows of o that are small by chance (few keys count, all nearly orthogonal to the query) are
    measured by what such a row has on average: normalised queries and keys may be rounded to bfloat16.
    """
    if name == "final_state":
        return state_allowance(anchor)
    return row_allowance(anchor, delta_rule_scale(*prepared(*(x.double() for x in inputs))).transpose(1, 2))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; operations of a form that takes 64 tokens at a time."""
    tokens, (keys, values, dim) = shape["B"] * shape["T"], (shape[name] for name in ("Hk", "Hv", "D"))
    moved = tokens * (4 * keys * dim + 4 * values * dim + 6 * values) + 2 * shape["B"] * values * dim**2
    chunk = min(64, shape["T"])
    return Cost(moved, tokens * values * (10 * chunk * dim + 6 * dim**2 + chunk**2), "bf16")
