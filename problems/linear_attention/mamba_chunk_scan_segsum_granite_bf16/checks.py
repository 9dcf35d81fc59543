"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.linear_attention.common import as_bf16, chunk_scan, same
from mkb_env.problems.linear_attention.mamba_chunk_scan_segsum_granite_bf16.problem import prepared, reference

INDEPENDENT = "the recurrence token by token in float64 on some heads; transformers' Granite scan at small sizes"
Outputs = tuple[torch.Tensor, ...]


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the definition."""
    x, dt, A, Bm, Cm, D, dt_bias = (part.double() for part in inputs[:-1])
    heads = [0, x.shape[2] // 2 - 1, x.shape[2] - 1]
    x = x[:, :, heads]
    delta = torch.log1p(torch.exp(dt[:, :, heads] + dt_bias[heads]))[..., None, None]
    state = x.new_zeros(len(x), len(heads), x.shape[-1], Bm.shape[-1])
    rows, starts = [], []
    for t in range(x.shape[1]):
        if t % inputs[-1] == 0:
            starts.append(state)
        state = torch.exp(delta[:, t] * A[heads, None, None]) * state
        state = state + delta[:, t] * x[:, t, :, :, None] * Bm[:, t, :, None]
        rows.append((state * Cm[:, t, :, None]).sum(-1))
    want = torch.stack(rows, 1) + D[heads, None] * x
    torch.testing.assert_close(truth[0][:, :, heads], want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(truth[1][:, :, heads], torch.stack(starts, 1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(truth[2][:, heads], state, rtol=1e-9, atol=1e-9)
    if truth[0].numel() <= 1 << 14:
        _against_transformers(inputs, truth)


def _against_transformers(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    x, dt, A, Bm, Cm, D, dt_bias = (part.float() for part in inputs[:-1])
    y, state = mamba2_chunk_scan(
        x, dt, A, Bm, Cm, inputs[-1], D=D, dt_bias=dt_bias, dt_softplus=True, return_final_states=True
    )
    for got, want in ((y, truth[0]), (state, truth[2])):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def _finished(y: torch.Tensor, skip: torch.Tensor, states: torch.Tensor, state: torch.Tensor) -> Outputs:
    outputs = ((y + skip).transpose(1, 2), states.transpose(1, 2), state)
    return tuple(part.bfloat16().contiguous() for part in outputs)


def _on_tensor_cores(*inputs: Any) -> Outputs:
    arguments, skip = prepared(*inputs[:-1])
    y, states, state = chunk_scan(*arguments, chunk=inputs[-1], operand=as_bf16)
    return _finished(y, skip, states, state)


def _in_parts(operand: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Outputs]:
    """A quarter of a chunk at a time."""

    def function(*inputs: Any) -> Outputs:
        arguments, skip = prepared(*inputs[:-1])
        y, states, state = chunk_scan(*arguments, chunk=inputs[-1] // 4, operand=operand)
        return _finished(y, skip, states[:, :, ::4], state)

    return function


def _states_after(*inputs: Any) -> Outputs:
    y, states, state = reference(*inputs)
    return y, torch.cat([states[:, 1:], state.unsqueeze(1)], 1), state


def _padding_decays(*inputs: Any) -> Outputs:
    """The final state of the tokens padded to whole chunks, whose time step is that of dt = 0."""
    *tensors, chunk = inputs
    x, dt, A, Bm, Cm, D, dt_bias = tensors
    tail = -x.shape[1] % chunk or chunk
    grown = [torch.cat([part, part.new_zeros(len(x), tail, *part.shape[2:])], 1) for part in (x, dt, Bm, Cm)]
    y, states, state = reference(grown[0], grown[1], A, grown[2], grown[3], D, dt_bias, chunk)
    count = -(-x.shape[1] // chunk)
    return y[:, : x.shape[1]].contiguous(), states[:, :count].contiguous(), state


def _skip_of_scaled(*inputs: Any) -> Outputs:
    arguments, _ = prepared(*inputs[:-1])
    y, states, state = chunk_scan(*arguments, chunk=inputs[-1])
    return _finished(y, arguments[0] * inputs[5][:, None, None], states, state)


def _mask_without_diagonal(*inputs: Any) -> Outputs:
    """A token does not see itself, except through the skip."""
    arguments, skip = prepared(*inputs[:-1])
    y, states, state = chunk_scan(*arguments, chunk=inputs[-1])
    x, _, Bm, Cm, _ = arguments
    return _finished(y - x * (Bm * Cm).sum(-1, keepdim=True), skip, states, state)


WRONG = {
    "chunk_states after each chunk": _states_after,
    "padded tokens decay the final state": _padding_decays,
    "the skip takes delta x": _skip_of_scaled,
    "the mask of a chunk excludes its diagonal": _mask_without_diagonal,
}
SECOND = {
    "chunks with bfloat16 operands": _on_tensor_cores,
    "a quarter of a chunk at a time": _in_parts(same),
    "a quarter of a chunk at a time with bfloat16 operands": _in_parts(as_bf16),
}
