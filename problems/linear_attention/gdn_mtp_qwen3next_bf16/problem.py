"""Several draft tokens of the gated delta rule per request, from a pool of states, keeping the state after every token
(Qwen3-Next, speculative verification).

B requests with T tokens each, a pool of M states, Hq query/key heads, Hv value heads (a multiple of Hq), D channels of
keys and values.

Inputs, contiguous and row-major:
  q             [B, T, Hq, D]     bfloat16  queries, already normalised
  k             [B, T, Hq, D]     bfloat16  keys, already normalised
  v             [B, T, Hv, D]     bfloat16  values
  pool          [M, Hv, D, D]     float32   states: value channel first, key channel last
  state_idx     [B]               int32     entry of the pool with which each request begins, in [0, M), all different
  A_log         [Hv]              float32   logarithm of the decay rate
  a             [B, T, Hv]        bfloat16  time steps before bias and softplus
  dt_bias       [Hv]              float32
  b             [B, T, Hv]        bfloat16  strength of the update before the sigmoid
  scale         float                       factor of the queries

Outputs, a tuple in this order, contiguous and row-major:
  o             [B, T, Hv, D]        bfloat16
  inter_states  [B, T, Hv, D, D]     float32   value channel first, key channel last

Value head h uses query/key head h // (Hv / Hq). For request r and head h, S = pool[state_idx[r], h], row = value
channel, and for t = 0, 1, ..., T - 1, with q_t, k_t, v_t those of token t of the request and head:
  decay = exp(-exp(A_log[h]) softplus(a[r, t, h] + dt_bias[h]))    softplus(z) = log(1 + exp(z))
  beta = sigmoid(b[r, t, h])
  S = decay S                                                      first the decay,
  S = S + outer(beta (v_t - S k_t), k_t)                           then what the decayed state predicts is corrected
  inter_states[r, t, h] = S
  o[r, t, h] = bfloat16(scale S q_t)                               read after the update

Numerics: inputs are widened exactly; everything is computed in float32, inter_states to float32's accuracy (nothing on
the way to them is rounded to fewer bits), and o is rounded once, to nearest even.

Rules:
- Entries of the pool that no request names may hold anything, NaN included, and must not influence the result.
- a + dt_bias may exceed 90, and A_log be so low (-4.5) that the decay is not 0 even then.
- state_idx is drawn: host code does not see its values.
- B, T and M are any positive numbers with B <= M.
- The inputs are not changed, the pool included; both outputs are new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.linear_attention.common import gdn_draws, gdn_gates, gdn_state_allowance, gdn_step

TITLE = "Draft tokens of the gated delta rule from pooled states, 8 key heads, 16 value heads of 128"
NUMBER = 73
MODEL = "Qwen3-Next-80B-A3B"
INPUTS = ("q", "k", "v", "pool", "state_idx", "A_log", "a", "dt_bias", "b", "scale")
OUTPUTS = ("o", "inter_states")
HOST_VISIBLE = ()
HEADS = {"Hq": 8, "Hv": 16, "D": 128, "scale": 128**-0.5}
WORKLOADS = {
    "full": {"B": 32, "T": 4, "M": 49, **HEADS, "slow_heads": 1, "special_tokens": 4},
    "small": {
        "B": 3,
        "T": 4,
        "M": 7,
        "Hq": 2,
        "Hv": 4,
        "D": 32,
        "scale": 32**-0.5,
        "slow_heads": 1,
        "special_tokens": 2,
    },
    "heldout": [
        {"B": 5, "T": 7, "M": 5, **HEADS, "slow_heads": 2, "special_tokens": 3},
        {"B": 49, "T": 2, "M": 64, **HEADS},
        {"B": 5, "T": 6, "M": 8, "Hq": 2, "Hv": 6, "D": 32, "scale": 0.25, "slow_heads": 1, "special_tokens": 2},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    batch, heads, dim = shape["B"], shape["Hv"], shape["D"]
    tokens, rate = (batch, shape["T"]), ((heads,), torch.float32)
    key, gate = ((*tokens, shape["Hq"], dim), torch.bfloat16), ((*tokens, heads), torch.bfloat16)
    value, pool = ((*tokens, heads, dim), torch.bfloat16), ((shape["M"], heads, dim, dim), torch.float32)
    return key, key, value, pool, ((batch,), torch.int32), rate, gate, rate, gate, shape["scale"]


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    tokens = shape["B"], shape["T"], shape["Hv"], shape["D"]
    return (tokens, torch.bfloat16), ((*tokens, shape["D"]), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Unit queries and keys, small values and states, NaN in states that no request names, in ``INPUTS``' order.

    The first ``slow_heads`` heads decay slowly. At random places, ``special_tokens`` tokens each have a = 100, or
    a + dt_bias from 3 to 4.5, in all heads.
    """
    batch, heads, dim = shape["B"], shape["Hv"], shape["D"]
    q, k, v, A_log, a, dt_bias, b = gdn_draws(generator, (batch, shape["T"]), shape["Hq"], heads, dim)
    A_log[: shape.get("slow_heads", 0)] = -4.5
    count = shape.get("special_tokens", 0)
    large, middle = permutation(generator, batch * shape["T"])[: 2 * count].view(2, count)
    a.flatten(0, 1)[large] = 100
    a.flatten(0, 1)[middle] = (torch.linspace(3, 4.5, count, device=a.device)[:, None] - dt_bias).bfloat16()
    pool = normal(generator, shape["M"], heads, dim, dim, scale=dim**-0.5)
    placement = permutation(generator, shape["M"])
    pool[placement[batch:]] = math.nan
    return q, k, v, pool, placement[:batch].clone(), A_log, a, dt_bias, b, shape["scale"]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    state_idx: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula, token by token; float64 inputs are computed in float64."""
    wide, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    queries, keys = (x.to(wide).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    state, o, states = pool[state_idx].to(wide), torch.empty_like(v), []
    for t in range(q.shape[1]):
        row, state = gdn_step(queries[:, t] * scale, keys[:, t], v[:, t].to(wide), g[:, t], beta[:, t], state)
        o[:, t] = row
        states.append(state)
    return o, torch.stack(states, dim=1)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor | None:
    """Of inter_states: float32's accuracy, whatever the order of sums and the formula of softplus."""
    if name == "o":
        return None
    A_log, a, dt_bias, b = (x.double() for x in inputs[5:9])
    g, _ = gdn_gates(a, b, A_log, dt_bias)
    before, carried, allowed = inputs[3][inputs[4]].double(), torch.zeros((), device=a.device), []
    for t in range(a.shape[1]):
        carried = gdn_state_allowance(before, anchor[:, t], g[:, t], A_log.exp(), carried)
        before = anchor[:, t]
        allowed.append(carried)
    return torch.stack(allowed, dim=1)


def COST(shape: Shape) -> Cost:
    """Named states are read once, all intermediate ones written once; seven operations per element and token."""
    batch, tokens, heads, dim = shape["B"], shape["B"] * shape["T"], shape["Hv"], shape["D"]
    rows = tokens * (4 * shape["Hq"] * dim + 4 * heads * dim + 4 * heads) + 8 * heads + 4 * batch
    return Cost(4 * (batch + tokens) * heads * dim**2 + rows, 7 * tokens * heads * dim**2, "fp32")
