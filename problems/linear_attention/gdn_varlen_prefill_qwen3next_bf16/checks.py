"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.linear_attention.common import as_bf16, chunk_delta_rule, same
from mkb_env.problems.linear_attention.gdn_varlen_prefill_qwen3next_bf16.problem import reference, sequences

INDEPENDENT = (
    "the recurrence token by token in float64 on some heads; transformers' Qwen3-Next recurrence at small sizes"
)
COUNTED = (0.1, 1.3)
"""The reference pads the short sequences of ``small`` to 64 tokens."""
Outputs = tuple[torch.Tensor, torch.Tensor]


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor, which takes 64 tokens at a time, against the definition, value-major throughout."""
    q, k, v, state, A_log, a, dt_bias, b = (x.double() for x in inputs[:8])
    heads = [0, v.shape[1] // 2, v.shape[1] - 1]
    sources = [h // (v.shape[1] // k.shape[1]) for h in heads]
    steps = torch.log1p(torch.exp(-(a + dt_bias).abs())) + (a + dt_bias).clamp_min(0)
    decay, beta = torch.exp(-A_log.exp() * steps)[:, heads, None, None], (1 / (1 + torch.exp(-b)))[:, heads, None]
    rows = []
    for s, (begin, end) in enumerate(pairwise(inputs[8].tolist())):
        now = state[s, heads]
        for t in range(begin, end):
            key, now = k[t, sources, None], now * decay[t]
            now = now + (beta[t] * (v[t, heads] - (now * key).sum(-1))).unsqueeze(-1) * key
            rows.append((now * q[t, sources, None]).sum(-1) * inputs[9])
        torch.testing.assert_close(truth[1][s, heads], now, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(truth[0][:, heads], torch.stack(rows), rtol=1e-9, atol=1e-12)
    if truth[0].numel() <= 1 << 14:
        _against_transformers(inputs, truth)


def _against_transformers(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    for s, begin, (q, k, v, g, beta, state) in sequences(*inputs):
        tokens = (x.transpose(1, 2) for x in (q * q.shape[-1] ** 0.5, k, v, g, beta))
        o, last = torch_recurrent_gated_delta_rule(*tokens, initial_state=state, output_final_state=True)
        torch.testing.assert_close(o[0].double(), truth[0][begin : begin + o.shape[1]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[0].mT.double(), truth[1][s], rtol=1e-4, atol=1e-5)


def _chunked(chunk: int, operand: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Outputs]:
    def function(*inputs: Any) -> Outputs:
        o, new_state = torch.empty_like(inputs[2]), inputs[3].bfloat16()
        for s, begin, arguments in sequences(*inputs):
            rows, last = chunk_delta_rule(*arguments, chunk=chunk, operand=operand)
            o[begin : begin + rows.shape[2]] = rows[0].transpose(0, 1)
            new_state[s] = last[0].mT
        return o, new_state

    return function


def _key_major(*inputs: Any) -> Outputs:
    q, k, v, state, *others = inputs
    o, new_state = reference(q, k, v, state.mT, *others)
    return o, new_state.mT.contiguous()


def _empty_is_zero(*inputs: Any) -> Outputs:
    o, new_state = reference(*inputs)
    new_state[inputs[8].diff() == 0] = 0
    return o, new_state


def _one_sequence(*inputs: Any) -> Outputs:
    """Chunks of 64 count from the first token of all, and what a chunk began with decides for its tokens."""
    cu_seqlens = inputs[8].clone()
    cu_seqlens[1:-1] = ((cu_seqlens[1:-1] + 63) // 64 * 64).clamp_max(int(cu_seqlens[-1]))
    return reference(*inputs[:8], cu_seqlens, inputs[9])


def _late_decay(*inputs: Any) -> Outputs:
    a = inputs[5].roll(1, 0)
    return reference(*inputs[:5], a, *inputs[6:])


WRONG = {
    "states are read and written key-major": _key_major,
    "the state of an empty sequence is zero": _empty_is_zero,
    "sequences begin at whole chunks": _one_sequence,
    "a token decays by the gate of the token before": _late_decay,
}
SECOND = {
    "16 tokens at a time": _chunked(16, same),
    "64 tokens at a time with bfloat16 operands, inverse in float32": _chunked(64, as_bf16),
    "16 tokens at a time with bfloat16 operands": _chunked(16, as_bf16),
}
