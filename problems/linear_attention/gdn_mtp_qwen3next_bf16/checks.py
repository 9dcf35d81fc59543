"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.linear_attention.common import as_bf16, fused_gdn_step, gdn_step
from mkb_env.problems.linear_attention.gdn_mtp_qwen3next_bf16.problem import reference

INDEPENDENT = "one triangular system per request and head over all draft tokens, float64, some requests"
Outputs = tuple[torch.Tensor, torch.Tensor]
Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Every state as a decayed sum of the pool's and of the corrections, which solve one system."""
    q, k, v, pool = (x.double() for x in inputs[:4])
    A_log, a, dt_bias, b = (x.double() for x in inputs[5:9])
    repeats, index = v.shape[2] // k.shape[2], inputs[4].tolist()
    logs = (-A_log.exp() * torch.logaddexp(a + dt_bias, torch.zeros_like(a))).cumsum(1)
    beta = 1 / (1 + torch.exp(-b))
    for r in {0, len(q) // 2, len(q) - 1}:
        for h in range(v.shape[2]):
            keys, start = k[r, :, h // repeats], pool[index[r], h]
            since, strength = logs[r, :, h].exp().unsqueeze(-1), beta[r, :, h, None]
            decay = (logs[r, :, h, None] - logs[r, :, h]).clamp_max(0).exp().tril()
            system = torch.eye(len(keys), device=q.device) + strength * (decay * (keys @ keys.T)).tril(-1)
            new = torch.linalg.solve(system, strength * (v[r, :, h] - since * (keys @ start.T)))
            states = since.unsqueeze(-1) * start + torch.einsum("ij,jv,jk->ivk", decay, new, keys)
            rows = torch.einsum("ivk,ik->iv", states, q[r, :, h // repeats]) * inputs[9]
            torch.testing.assert_close(truth[1][r, :, h], states, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(truth[0][r, :, h], rows, rtol=1e-9, atol=1e-12)


def _stepping(
    step: Step, keep: Callable[[torch.Tensor], torch.Tensor] = lambda state: state, linear: float = 20
) -> Callable[..., Outputs]:
    """The reference with another step, softplus by a plain logarithm up to ``linear`` and the identity beyond, and
    ``keep`` applied to each carried state.
    """

    def function(*inputs: Any) -> Outputs:
        q, k, v, pool = (x.float() for x in inputs[:4])
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        z = inputs[6].float() + inputs[7]
        g = -inputs[5].exp() * torch.where(z > linear, z, torch.log(1 + torch.exp(z)))
        beta = 1 / (1 + torch.exp(-inputs[8].float()))
        state, rows, states = pool[inputs[4]], [], []
        for t in range(q.shape[1]):
            row, state = step(q[:, t] * inputs[9], k[:, t], v[:, t], g[:, t], beta[:, t], state)
            rows.append(row)
            states.append(state)
            state = keep(state)
        return torch.stack(rows, 1).bfloat16(), torch.stack(states, 1)

    return function


def _sums_in_order(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prediction summed key channel by key channel."""
    state = state * g.exp()[..., None, None]
    predicted = (state * k.unsqueeze(-2)).cumsum(dim=-1)[..., -1]
    state = state + (beta.unsqueeze(-1) * (v - predicted)).unsqueeze(-1) * k.unsqueeze(-2)
    return (state * q.unsqueeze(-2)).sum(dim=-1), state


def _first_entries(*inputs: Any) -> Outputs:
    """Request r begins with entry r of the pool."""
    q, k, v, pool, _, *others = inputs
    return reference(q, k, v, pool.nan_to_num(), torch.arange(len(q), device=q.device), *others)


def _states_before(*inputs: Any) -> Outputs:
    o, states = reference(*inputs)
    return o, torch.cat([inputs[3][inputs[4]].unsqueeze(1), states[:, :-1]], 1)


def _no_rollover(*inputs: Any) -> Outputs:
    """Every token begins with the pool's state."""
    _, _, _, pool, state_idx, A_log, _, dt_bias, _, scale = inputs
    parts = []
    for t in range(inputs[0].shape[1]):
        q, k, v, a, b = (inputs[place][:, t : t + 1] for place in (0, 1, 2, 6, 8))
        parts.append(reference(q, k, v, pool, state_idx, A_log, a, dt_bias, b, scale))
    o, states = zip(*parts, strict=True)
    return torch.cat(o, 1), torch.cat(states, 1)


WRONG = {
    "states are carried on in bfloat16": _stepping(gdn_step, as_bf16),
    "request r begins with entry r of the pool": _first_entries,
    "inter_states before each token": _states_before,
    "every token begins with the pool's state": _no_rollover,
    "softplus overflows": _stepping(gdn_step, linear=math.inf),
    "softplus is the identity from 2 on": _stepping(gdn_step, linear=2),
    "softplus is the identity from 4 on": _stepping(gdn_step, linear=4),
}
SECOND = {
    "both reductions over the old state, softplus by log": _stepping(fused_gdn_step),
    "the prediction summed channel by channel": _stepping(_sums_in_order),
}
