"""One decode step of the gated delta rule for a batch of requests (Qwen3-Next linear attention).

B requests with one token each, Hq query/key heads, Hv value heads (a multiple of Hq), D channels of keys and values.

Inputs, contiguous and row-major:
  q          [B, 1, Hq, D]  bfloat16  queries, already normalised
  k          [B, 1, Hq, D]  bfloat16  keys, already normalised
  v          [B, 1, Hv, D]  bfloat16  values
  state      [B, Hv, D, D]  float32   value channel first, key channel last
  A_log      [Hv]           float32   logarithm of the decay rate
  a          [B, 1, Hv]     bfloat16  time steps before bias and softplus
  dt_bias    [Hv]           float32
  b          [B, 1, Hv]     bfloat16  strength of the update before the sigmoid
  scale      float                    factor of the queries

Outputs, a tuple in this order, contiguous and row-major:
  o          [B, 1, Hv, D]  bfloat16
  new_state  [B, Hv, D, D]  float32   value channel first, key channel last

Value head h uses query/key head h // (Hv / Hq). For request r and head h, with q, k, v those of the request and head
and S the D x D matrix state[r, h], row = value channel:
  decay = exp(-exp(A_log[h]) softplus(a[r, 0, h] + dt_bias[h]))    softplus(z) = log(1 + exp(z))
  beta = sigmoid(b[r, 0, h])
  S = decay S                                                      first the decay,
  S = S + outer(beta (v - S k), k)                                 then what the decayed state predicts is corrected
  new_state[r, h] = S
  o[r, 0, h] = bfloat16(scale S q)                                 read after the update

Numerics: inputs are widened exactly; everything is computed in float32, new_state to float32's accuracy (nothing on the
way to it is rounded to fewer bits), and o is rounded once, to nearest even.

Rules:
- A decay may be so small that nothing of the old state is left.
- B is any positive number.
- The inputs are not changed, state included; both outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal
from mkb_env.problems.linear_attention.common import gdn_draws, gdn_gates, gdn_state_allowance, gdn_step

TITLE = "One decode step of the gated delta rule, 8 key heads, 16 value heads of 128"
NUMBER = 72
MODEL = "Qwen3-Next-80B-A3B"
INPUTS = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "scale")
OUTPUTS = ("o", "new_state")
HOST_VISIBLE = ()
HEADS = {"Hq": 8, "Hv": 16, "D": 128, "scale": 128**-0.5}
WORKLOADS = {
    "full": {"B": 128, **HEADS, "fast_heads": 1},
    "small": {"B": 3, "Hq": 2, "Hv": 4, "D": 32, "scale": 32**-0.5, "fast_heads": 1},
    "heldout": [{"B": 1, **HEADS}, {"B": 77, **HEADS, "fast_heads": 2}],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    batch, heads, dim = shape["B"], shape["Hv"], shape["D"]
    key, gate, rate = ((batch, 1, shape["Hq"], dim), torch.bfloat16), (batch, 1, heads), ((heads,), torch.float32)
    return (
        key,
        key,
        ((*gate, dim), torch.bfloat16),
        ((batch, heads, dim, dim), torch.float32),
        rate,
        (gate, torch.bfloat16),
        rate,
        (gate, torch.bfloat16),
        shape["scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return input_specs(shape)[2:4]


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Unit queries and keys, small values and states, in ``INPUTS``' order; the last ``fast_heads`` heads decay e^3
    times faster.
    """
    batch, heads, dim = shape["B"], shape["Hv"], shape["D"]
    q, k, v, A_log, a, dt_bias, b = gdn_draws(generator, (batch, 1), shape["Hq"], heads, dim)
    A_log[heads - shape.get("fast_heads", 0) :] += 3
    return q, k, v, normal(generator, batch, heads, dim, dim, scale=dim**-0.5), A_log, a, dt_bias, b, shape["scale"]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    wide, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    g, beta = gdn_gates(a[:, 0], b[:, 0], A_log, dt_bias)
    query, key = (x[:, 0].to(wide).repeat_interleave(heads // x.shape[2], dim=1) for x in (q, k))
    o, new_state = gdn_step(query * scale, key, v[:, 0].to(wide), g, beta, state.to(wide))
    return o.unsqueeze(1).to(v.dtype), new_state


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor | None:
    """Of new_state: float32's accuracy, whatever the order of sums and the formula of softplus."""
    if name == "o":
        return None
    state, A_log, a, dt_bias, b = (x.double() for x in inputs[3:8])
    g, _ = gdn_gates(a[:, 0], b[:, 0], A_log, dt_bias)
    return gdn_state_allowance(state, anchor, g, A_log.exp())


def COST(shape: Shape) -> Cost:
    """The state is read once and written once; seven operations per element of it."""
    batch, heads, dim = shape["B"], shape["Hv"], shape["D"]
    tokens = batch * (4 * shape["Hq"] * dim + 4 * heads * dim + 4 * heads) + 8 * heads
    return Cost(8 * batch * heads * dim**2 + tokens, 7 * batch * heads * dim**2, "fp32")
