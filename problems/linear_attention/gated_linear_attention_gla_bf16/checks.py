"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.linear_attention.common import as_bf16, chunk_channel_rule, same
from mkb_env.problems.linear_attention.gated_linear_attention_gla_bf16.problem import prepared, reference

INDEPENDENT = "every pair of tokens weighed by its decay, channel by channel, in float64, on some heads"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """No state: o_i is the sum over j <= i of v_j, weighed by sum_c q_ic k_jc e^(gk_{j+1} + ... + gk_i)_c."""
    q, k, v, gk = (x.double() for x in inputs)
    for b, h in {(0, 0), (len(q) - 1, v.shape[2] - 1), (len(q) // 2, v.shape[2] // 2)}:
        sums = gk[b, :, h].cumsum(0)
        want = []
        for i in range(q.shape[1]):
            decay = (sums[i] - sums[: i + 1]).exp()
            weights = (k[b, : i + 1, h] * decay) @ q[b, i, h] / q.shape[-1] ** 0.5
            want.append(weights @ v[b, : i + 1, h])
        torch.testing.assert_close(truth[0][b, :, h], torch.stack(want), rtol=1e-9, atol=1e-10)


def _chunked(chunk: int, operand: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(*inputs: torch.Tensor) -> torch.Tensor:
        o = chunk_channel_rule(*prepared(*inputs), None, chunk=chunk, operand=operand)
        return o.transpose(1, 2).bfloat16().contiguous()

    return function


def _by_token(*inputs: torch.Tensor) -> torch.Tensor:
    queries, keys, values, gates = prepared(*inputs)
    decay = gates.exp().unsqueeze(-1)
    state = queries.new_zeros(*queries.shape[:2], queries.shape[-1], values.shape[-1])
    o = torch.empty_like(values)
    for t in range(queries.shape[2]):
        state = state * decay[:, :, t] + keys[:, :, t, :, None] @ values[:, :, t, None]
        o[:, :, t] = (queries[:, :, t, None] @ state).squeeze(2)
    return o.transpose(1, 2).bfloat16().contiguous()


def _token_decays(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    """diag(e^gk) (S + k (x) v) in place of diag(e^gk) S + k (x) v."""
    return reference(q, k.float() * gk.float().exp(), v, gk).bfloat16()


def _read_before_update(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    own = (q.float() * k.float()).sum(-1, keepdim=True) * q.shape[-1] ** -0.5 * v.float()
    return (reference(*(x.float() for x in (q, k, v, gk))) - own).bfloat16()


def _value_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    """The scale of the values' width in place of the keys'."""
    return reference(q.float() * (k.shape[-1] / v.shape[-1]) ** 0.5, k, v, gk).bfloat16()


def _groups_start_empty(*inputs: torch.Tensor) -> torch.Tensor:
    return torch.cat([reference(*parts) for parts in zip(*(x.split(64, dim=1) for x in inputs), strict=True)], 1)


def _late_decay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    return reference(q, k, v, torch.cat([torch.zeros_like(gk[:, :1]), gk[:, :-1]], 1))


WRONG = {
    "the token's own key decays": _token_decays,
    "the state is read before the token is added": _read_before_update,
    "scaled by V^-1/2": _value_scale,
    "the state decays after the token, not before": _late_decay,
    "the state is forgotten every 64 tokens": _groups_start_empty,
    "keys divided by the decays of 64 tokens": _chunked(64, same),
    "keys divided by the decays of all tokens": _chunked(256, same),
}
SECOND = {
    "token by token": _by_token,
    "8 tokens at a time": _chunked(8, same),
    "16 tokens at a time with bfloat16 operands": _chunked(16, as_bf16),
}
