"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.linear_attention.common import as_bf16, chunk_scan, same
from mkb_env.problems.linear_attention.multiscale_retention_retnet_bf16.problem import log_decays, reference

INDEPENDENT = "the recurrent form, a state per head carried from token to token, in float64, on some heads"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """S <- c S + k (x) v, o = q S / sqrt(K), with c as a fraction."""
    q, k, v = (x.double() for x in inputs)
    for b, h in {(0, 0), (len(q) - 1, q.shape[1] - 1), (len(q) // 2, q.shape[1] // 2)}:
        decay, rows = (2 ** (5 + h) - 1) / 2 ** (5 + h), []
        state = q.new_zeros(q.shape[-1], v.shape[-1])
        for t in range(q.shape[2]):
            state = decay * state + torch.outer(k[b, h, t], v[b, h, t])
            rows.append(q[b, h, t] @ state / q.shape[-1] ** 0.5)
        torch.testing.assert_close(truth[0][b, h], torch.stack(rows), rtol=1e-9, atol=1e-9)


def _chunked(chunk: int, operand: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A state carried from chunk to chunk; values in place of a scan's x, keys and queries in place of B and C."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        alpha = log_decays(q).expand(q.shape[:-1])
        state = torch.zeros(*q.shape[:2], v.shape[-1], k.shape[-1], device=q.device)
        o, _, _ = chunk_scan(v.float(), alpha, k.float(), q.float(), state, chunk=chunk, operand=operand)
        return (o * q.shape[-1] ** -0.5).bfloat16().contiguous()

    return function


def _quadratic(weight: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The formula with ``weight(distance, logarithms of the decays)`` in place of the decays."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        position = torch.arange(q.shape[2], device=q.device)
        distance = (position.unsqueeze(-1) - position).float()
        decay = weight(distance, log_decays(q).unsqueeze(-1))
        scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
        return (as_bf16(scores * decay) @ v.float()).bfloat16()

    return function


def _normalised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each row over the root of its decays' sum, as the model's own parallel form does before its group norm."""
    positions = torch.arange(1, q.shape[2] + 1, device=q.device)
    decay = log_decays(q)
    sums = torch.expm1(positions * decay) / torch.expm1(decay)
    return (reference(q, k, v).float() * sums.rsqrt().unsqueeze(-1)).bfloat16()


WRONG = {
    "heads counted from 1": _quadratic(
        lambda distance, logs: (distance * torch.log1p(0.5 * torch.expm1(logs))).exp().tril()
    ),
    "a factor of the decay too many": _quadratic(lambda distance, logs: ((distance + 1) * logs).exp().tril()),
    "a token does not see itself": _quadratic(lambda distance, logs: (distance * logs).exp().tril(-1)),
    "rows are normalised": _normalised,
    "heads from 4 on do not decay": _quadratic(
        lambda distance, logs: (
            (distance * logs * (torch.arange(len(logs), device=logs.device) < 4)[:, None, None]).exp().tril()
        )
    ),
    "heads from 3 on decay alike": _quadratic(
        lambda distance, logs: (distance * logs[torch.arange(len(logs), device=logs.device).clamp_max(3)]).exp().tril()
    ),
}
SECOND = {
    "bfloat16 weights": _quadratic(lambda distance, logs: (distance * logs).exp().tril()),
    "64 tokens at a time": _chunked(64, same),
    "64 tokens at a time with bfloat16 operands": _chunked(64, as_bf16),
}
