"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.linear_attention.common import as_bf16, fused_gdn_step, gdn_gates, gdn_step
from mkb_env.problems.linear_attention.gdn_decode_qwen3next_bf16.problem import reference

INDEPENDENT = "S (I - beta k k^T) decay + beta v k^T as matrices, gates by math, some requests and heads in float64"
Outputs = tuple[torch.Tensor, torch.Tensor]


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Head by head from the update's matrix."""
    q, k, v, state, A_log, a, dt_bias, b = (x.double() for x in inputs[:8])
    repeats = v.shape[2] // k.shape[2]
    identity = torch.eye(q.shape[-1], dtype=torch.float64, device=q.device)
    for r in {0, len(q) // 2, len(q) - 1}:
        for h in range(v.shape[2]):
            z = float(a[r, 0, h] + dt_bias[h])
            decay = math.exp(-math.exp(A_log[h]) * (max(z, 0.0) + math.log1p(math.exp(-abs(z)))))
            beta = 1 / (1 + math.exp(-b[r, 0, h]))
            key, query = k[r, 0, h // repeats], q[r, 0, h // repeats]
            now = decay * state[r, h] @ (identity - beta * torch.outer(key, key)) + beta * torch.outer(v[r, 0, h], key)
            torch.testing.assert_close(truth[1][r, h], now, rtol=1e-9, atol=1e-13)
            torch.testing.assert_close(truth[0][r, 0, h], now @ query * inputs[8], rtol=1e-9, atol=1e-13)


def _heads(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """The arguments of a step but for its gates."""
    q, k, v, state = (x.float() for x in inputs[:4])
    q, k = (x[:, 0].repeat_interleave(v.shape[2] // x.shape[2], dim=1) for x in (q, k))
    return q * inputs[8], k, v[:, 0], state


def _fused(*inputs: Any) -> Outputs:
    """The gates with plain logarithms and powers of two."""
    (q, k, v, state), (A_log, a, dt_bias, b) = _heads(*inputs), (x.float() for x in inputs[4:8])
    z = a[:, 0] + dt_bias
    g = -A_log.exp() * torch.where(z > 20, z, torch.log(1 + torch.exp(z)))
    o, new_state = fused_gdn_step(q, k, v, g, 1 / (1 + torch.exp(-b[:, 0])), state)
    return o.unsqueeze(1).bfloat16(), new_state


def _sums_in_order(*inputs: Any) -> Outputs:
    """The prediction summed key channel by key channel."""
    (q, k, v, state), (A_log, a, dt_bias, b) = _heads(*inputs), inputs[4:8]
    g, beta = gdn_gates(a[:, 0], b[:, 0], A_log, dt_bias)
    state = state * g.exp()[..., None, None]
    predicted = (state * k.unsqueeze(-2)).cumsum(dim=-1)[..., -1]
    state = state + (beta.unsqueeze(-1) * (v - predicted)).unsqueeze(-1) * k.unsqueeze(-2)
    return (state * q.unsqueeze(-2)).sum(-1).unsqueeze(1).bfloat16(), state


def _old_state_predicts(*inputs: Any) -> Outputs:
    """The prediction comes from the state before its decay."""
    (q, k, v, state), (A_log, a, dt_bias, b) = _heads(*inputs), inputs[4:8]
    g, beta = gdn_gates(a[:, 0], b[:, 0], A_log, dt_bias)
    correction = beta.unsqueeze(-1) * (v - (state * k.unsqueeze(-2)).sum(-1))
    state = state * g.exp()[..., None, None] + correction.unsqueeze(-1) * k.unsqueeze(-2)
    return (state * q.unsqueeze(-2)).sum(-1).unsqueeze(1).bfloat16(), state


def _read_before_update(*inputs: Any) -> Outputs:
    (q, _, _, state), (A_log, a, dt_bias, b) = _heads(*inputs), inputs[4:8]
    g, _ = gdn_gates(a[:, 0], b[:, 0], A_log, dt_bias)
    o = (state * q.unsqueeze(-2)).sum(-1) * g.exp().unsqueeze(-1)
    return o.unsqueeze(1).bfloat16(), reference(*inputs)[1]


def _rounded_correction(*inputs: Any) -> Outputs:
    """What is added to the state is a product of bfloat16 operands."""
    (q, k, v, state), (A_log, a, dt_bias, b) = _heads(*inputs), inputs[4:8]
    g, beta = gdn_gates(a[:, 0], b[:, 0], A_log, dt_bias)
    state = state * g.exp()[..., None, None]
    correction = as_bf16(beta.unsqueeze(-1) * (v - (state * k.unsqueeze(-2)).sum(-1)))
    state = state + correction.unsqueeze(-1) * k.unsqueeze(-2)
    return (state * q.unsqueeze(-2)).sum(-1).unsqueeze(1).bfloat16(), state


def _key_major(*inputs: Any) -> Outputs:
    (q, k, v, state), (A_log, a, dt_bias, b) = _heads(*inputs), inputs[4:8]
    o, state = gdn_step(q, k, v, *gdn_gates(a[:, 0], b[:, 0], A_log, dt_bias), state.mT)
    return o.unsqueeze(1).bfloat16(), state.mT.contiguous()


WRONG = {
    "the state before its decay predicts": _old_state_predicts,
    "the state is read before the update": _read_before_update,
    "the correction is rounded to bfloat16": _rounded_correction,
    "states are read and written key-major": _key_major,
}
SECOND = {
    "both reductions over the old state, gates by log and exp2": _fused,
    "the prediction summed channel by channel": _sums_in_order,
}
