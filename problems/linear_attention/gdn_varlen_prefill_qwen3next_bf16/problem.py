"""Gated delta rule over packed sequences of different lengths, each with a carried-in state (Qwen3-Next, prefill).

T tokens of n sequences in all, Hq query/key heads, Hv value heads (a multiple of Hq), D channels of keys and values.

Inputs, contiguous and row-major:
  q           [T, Hq, D]      bfloat16  queries, already normalised
  k           [T, Hq, D]      bfloat16  keys, already normalised
  v           [T, Hv, D]      bfloat16  values
  state       [n, Hv, D, D]   float32   states before the first token: value channel first, key channel last
  A_log       [Hv]            float32   logarithm of the decay rate
  a           [T, Hv]         bfloat16  time steps before bias and softplus
  dt_bias     [Hv]            float32
  b           [T, Hv]         bfloat16  strength of the update before the sigmoid
  cu_seqlens  [n + 1]         int64     0 = cu_seqlens[0] <= cu_seqlens[1] <= ... <= cu_seqlens[n] = T
  scale       float                     factor of the queries

Outputs, a tuple in this order, contiguous and row-major:
  o           [T, Hv, D]      bfloat16
  new_state   [n, Hv, D, D]   bfloat16  value channel first, key channel last

Value head h uses query/key head h // (Hv / Hq). For sequence s and head h, S is a D x D matrix with the key channel
first, at first the transpose of state[s, h]; for t = cu_seqlens[s], ..., cu_seqlens[s + 1] - 1, with q_t, k_t, v_t
those of token t and head h:
  decay = exp(-exp(A_log[h]) softplus(a[t, h] + dt_bias[h]))     softplus(z) = log(1 + exp(z))
  beta = sigmoid(b[t, h])
  S = decay S                                                    first the decay,
  S = S + outer(k_t, beta (v_t - k_t^T S))                       then what the decayed state predicts is corrected
  o[t, h] = bfloat16(scale q_t^T S)                              read after the update
and new_state[s, h] = bfloat16(transpose of S) after the last token.

Numerics: inputs are widened exactly; the recurrence runs in float32 and both outputs are rounded once, to nearest even.
Any order of evaluation that equals the recurrence is allowed, tokens taken in groups included, and so are products of
operands rounded to bfloat16 with sums in float32.

Rules:
- A sequence without tokens has its state, rounded, as its new_state.
- A decay may be so small that it is 0 in float32: the state is forgotten.
- cu_seqlens is fixed by the workload and its values are visible to host code.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, offsets, permutation
from mkb_env.problems.linear_attention.common import (
    by_head,
    chunk_delta_rule,
    delta_rule_scale,
    gdn_draws,
    gdn_gates,
    row_allowance,
    state_allowance,
)

TITLE = "Gated delta rule over packed sequences with carried states, 8 key heads, 16 value heads of 128"
NUMBER = 71
MODEL = "Qwen3-Next-80B-A3B"
INPUTS = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "cu_seqlens", "scale")
OUTPUTS = ("o", "new_state")
HOST_VISIBLE = ("cu_seqlens",)
HEADS = {"Hq": 8, "Hv": 16, "D": 128, "scale": 128**-0.5}
WORKLOADS = {
    "full": {"lengths": [19, 31, 890, 19, 0, 1024, 2048, 1, 64], **HEADS, "resets": 4},
    "small": {"lengths": [5, 0, 35, 8], "Hq": 2, "Hv": 4, "D": 32, "scale": 32**-0.5, "resets": 1},
    "heldout": [
        {"lengths": [63, 64, 65, 0, 128, 1, 333], **HEADS, "resets": 2},
        {"lengths": [1500], **HEADS},
        {"lengths": [0, 1, 70, 16, 0], "Hq": 1, "Hv": 3, "D": 32, "scale": 0.25},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each sequence's tokens begin."""
    return {"cu_seqlens": offsets(shape["lengths"])}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    count, tokens, heads, dim = len(shape["lengths"]), sum(shape["lengths"]), shape["Hv"], shape["D"]
    key, gate = ((tokens, shape["Hq"], dim), torch.bfloat16), ((tokens, heads), torch.bfloat16)
    value, state = ((tokens, heads, dim), torch.bfloat16), ((count, heads, dim, dim), torch.float32)
    rate = (heads,), torch.float32
    return key, key, value, state, rate, gate, rate, gate, ((count + 1,), torch.int64), shape["scale"]


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    _, _, value, (state, _), *_ = input_specs(shape)
    return value, (state, torch.bfloat16)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Unit queries and keys, small values and states, in ``INPUTS``' order.

    At random places, ``resets`` tokens have a = 100 in all heads.
    """
    tokens, heads, dim = sum(shape["lengths"]), shape["Hv"], shape["D"]
    q, k, v, A_log, a, dt_bias, b = gdn_draws(generator, (tokens,), shape["Hq"], heads, dim)
    state = normal(generator, len(shape["lengths"]), heads, dim, dim, scale=dim**-0.5)
    a[permutation(generator, tokens)[: shape.get("resets", 0)]] = 100
    cu_seqlens = torch.tensor(geometry(shape)["cu_seqlens"], device=generator.device)
    return q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, shape["scale"]


def sequences(*inputs: Any) -> Iterator[tuple[int, int, tuple[torch.Tensor, ...]]]:
    """Of each sequence with tokens: its number, its first token, the arguments of the delta rule."""
    q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale = inputs
    wide, heads = torch.promote_types(q.dtype, torch.float32), v.shape[1]
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if begin == end:
            continue
        queries, keys, values = (by_head(x[None, begin:end].to(wide), heads) for x in (q, k, v))
        gates = (x[None, begin:end].transpose(1, 2) for x in (g, beta))
        yield s, begin, (queries * scale, keys, values, *gates, state[s : s + 1].to(wide).mT)


def reference(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula, sequence by sequence, 64 tokens at a time; float64 inputs are computed in float64."""
    v, state = inputs[2:4]
    o, new_state = torch.empty_like(v), state.to(v.dtype, copy=True)
    for s, begin, arguments in sequences(*inputs):
        rows, last = chunk_delta_rule(*arguments)
        o[begin : begin + rows.shape[2]] = rows[0].transpose(0, 1)
        new_state[s] = last[0].mT
    return o, new_state


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but rows of o that are small by chance (few keys count, all nearly orthogonal to the query) are
    measured by what such a row has on average: states may be rounded to bfloat16 before they are read.
    """
    if name == "new_state":
        return state_allowance(anchor)
    wide = (x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
    scales = [delta_rule_scale(*arguments)[0].transpose(0, 1) for _, _, arguments in sequences(*wide)]
    return row_allowance(anchor, torch.cat(scales))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; operations of a form that takes at most 64 tokens at a time."""
    lengths, heads, dim = shape["lengths"], shape["Hv"], shape["D"]
    tokens = 4 * sum(lengths) * (shape["Hq"] * dim + heads * dim + heads)
    others = 6 * len(lengths) * heads * dim**2 + 8 * heads + 8 * (len(lengths) + 1)
    chunks = [(length, min(64, length)) for length in lengths]
    flops = sum(length * heads * (10 * chunk * dim + 6 * dim**2 + chunk**2) for length, chunk in chunks)
    return Cost(tokens + others, flops, "bf16")
