"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import softplus

from mkb_env.problems.linear_attention.common import as_bf16, chunk_scan, same
from mkb_env.problems.linear_attention.mamba2_selective_scan_nemotron_h_bf16.problem import prepared, reference

INDEPENDENT = "the recurrence token by token in float64 on some heads; transformers' Nemotron-H scan at small sizes"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor, which takes 128 tokens at a time, against the definition."""
    x, dt, A_log, Bm, Cm, D, dt_bias, h0 = (part.double() for part in inputs)
    heads = [0, x.shape[2] // 2 - 1, x.shape[2] - 1]
    groups = [h // (x.shape[2] // Bm.shape[2]) for h in heads]
    x, dt, Bm, Cm, state = x[:, :, heads], dt[:, :, heads], Bm[:, :, groups], Cm[:, :, groups], h0[:, heads]
    delta = torch.log1p(torch.exp(dt + dt_bias[heads]))[..., None, None]
    decay = torch.exp(-delta * torch.exp(A_log[heads])[:, None, None])
    rows = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + torch.einsum("bhp,bhn->bhpn", x[:, t], Bm[:, t]) * delta[:, t]
        rows.append(torch.einsum("bhpn,bhn->bhp", state, Cm[:, t]))
    want = torch.stack(rows, 1) + D[heads, None] * x
    torch.testing.assert_close(truth[0][:, :, heads], want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(truth[1][:, heads], state, rtol=1e-9, atol=1e-9)
    if truth[0].numel() <= 1 << 14:
        _against_transformers(inputs, truth)


def _against_transformers(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    x, dt, A_log, Bm, Cm, D, dt_bias, h0 = (part.float() for part in inputs)
    y, state = mamba2_chunk_scan(
        x,
        dt,
        -A_log.exp(),
        Bm,
        Cm,
        chunk_size=32,
        D=D,
        dt_bias=dt_bias,
        initial_states=h0,
        dt_softplus=True,
        return_final_states=True,
    )
    for got, want in ((y, truth[0]), (state, truth[1])):
        size = want.abs().amax(dim=-1, keepdim=True)
        # Differences of sums in float32 that reach thousands are exponents there, so 1e-4 is not enough.
        torch.testing.assert_close(got.double() / size, want / size, rtol=1e-3, atol=1e-3)


def _scan(
    chunk: int, operand: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arguments, skip = prepared(*inputs)
        y, _, state = chunk_scan(*arguments, chunk=chunk, operand=operand)
        return (y + skip).transpose(1, 2).bfloat16().contiguous(), state.bfloat16()

    return function


def _skip_of_scaled(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    arguments, _ = prepared(*inputs)
    y, _, state = chunk_scan(*arguments, chunk=128)
    y = y + arguments[0] * inputs[5][:, None, None]
    return y.transpose(1, 2).bfloat16().contiguous(), state.bfloat16()


def _decayed_token(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (x, alpha, *others), skip = prepared(*inputs)
    y, _, state = chunk_scan(x * alpha.exp().unsqueeze(-1), alpha, *others, chunk=128)
    return (y + skip).transpose(1, 2).bfloat16().contiguous(), state.bfloat16()


def _with_steps(step: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Another softplus."""

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, A_log, _, _, _, dt_bias, _ = inputs
        (_, _, *others), skip = prepared(*inputs)
        delta = step(dt.float() + dt_bias).transpose(1, 2)
        x = x.float().transpose(1, 2) * delta.unsqueeze(-1)
        y, _, state = chunk_scan(x, -delta * A_log.exp().unsqueeze(-1), *others, chunk=128)
        return (y + skip).transpose(1, 2).bfloat16().contiguous(), state.bfloat16()

    return function


def _groups_interleaved(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, A_log, Bm, Cm, *others = inputs
    repeats = x.shape[2] // Bm.shape[2]
    return reference(x, dt, A_log, Bm.repeat(1, 1, repeats, 1), Cm.repeat(1, 1, repeats, 1), *others)


def _chunks_start_empty(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the first 128 tokens see what came before."""
    y, state = reference(*inputs)
    x, dt, A_log, Bm, Cm, D, dt_bias, h0 = inputs
    x, dt, Bm, Cm = (part[:, 128:] for part in (x, dt, Bm, Cm))
    y[:, 128:], _ = reference(x, dt, A_log, Bm, Cm, D, dt_bias, torch.zeros_like(h0))
    return y, state


WRONG = {
    "the skip takes delta x": _skip_of_scaled,
    "a token decays as it enters the state": _decayed_token,
    "head h reads group h modulo G": _groups_interleaved,
    "tokens from 128 on do not see the state before them": _chunks_start_empty,
    "softplus overflows": _with_steps(lambda z: torch.log1p(torch.exp(z))),
    "softplus loses small steps": _with_steps(lambda z: torch.where(z > 20, z, torch.log(1 + torch.exp(z)))),
    "steps of 1e-4 at least": _with_steps(lambda z: softplus(z).clamp_min(1e-4)),
    "softplus is the identity from 2 on": _with_steps(lambda z: torch.where(z > 2, z, softplus(z))),
}
SECOND = {
    "32 tokens at a time": _scan(32, same),
    "128 tokens at a time with bfloat16 operands": _scan(128, as_bf16),
    "64 tokens at a time with bfloat16 operands": _scan(64, as_bf16),
}
