"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mkb_env.problems.linear_attention.chunk_gated_delta_rule_qwen3next_bf16.problem import prepared, reference
from mkb_env.problems.linear_attention.common import as_bf16, chunk_delta_rule, token_delta_rule

Outputs = tuple[torch.Tensor, torch.Tensor]
INDEPENDENT = (
    "the recurrence token by token in float64 on some heads; transformers' Qwen3-Next recurrence at small sizes"
)


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor, which takes 64 tokens at a time, against the definition."""
    q, k, v, g, beta = (x.double() for x in inputs)
    heads, scale = [0, v.shape[2] // 2 - 1, v.shape[2] - 1], q.shape[-1] ** -0.5
    sources = [h // (v.shape[2] // k.shape[2]) for h in heads]
    queries, keys = (x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q[:, :, sources], k[:, :, sources]))
    values, decay, weight = v[:, :, heads], g[:, :, heads].exp(), beta[:, :, heads]
    state = q.new_zeros(len(q), len(heads), q.shape[-1], v.shape[-1])
    rows = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        missing = values[:, t] - torch.einsum("bhk,bhkv->bhv", keys[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", keys[:, t], weight[:, t, :, None] * missing)
        rows.append(torch.einsum("bhk,bhkv->bhv", queries[:, t] * scale, state))
    torch.testing.assert_close(truth[0][:, :, heads], torch.stack(rows, 1), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(truth[1][:, heads], state, rtol=1e-9, atol=1e-10)
    if q.shape[1] * q.shape[-1] <= 4096:
        _against_transformers(inputs, truth)


def _against_transformers(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, g, beta = (x.float() for x in inputs)
    o, state = torch_recurrent_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for got, want in ((o, truth[0]), (state, truth[1])):
        size = want.abs().amax(dim=-1, keepdim=True).clamp_min(0.1)
        torch.testing.assert_close(got.double() / size, want / size, rtol=1e-4, atol=1e-4)


def _heads_first(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *prepared_inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v = prepared_inputs[:3]
    o, state = function(*prepared_inputs, q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]))
    return o.transpose(1, 2).bfloat16().contiguous(), state.bfloat16()


def _on_tensor_cores(chunk: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, *others = prepared(*inputs)
        rule = partial(chunk_delta_rule, chunk=chunk, operand=as_bf16)
        return _heads_first(rule, as_bf16(q), as_bf16(k), *others)

    return function


def _by_token(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _heads_first(token_delta_rule, *prepared(*inputs))


def _weak_resets(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Outputs:
    return reference(q, k, v, g.clamp_min(-10), beta)


def _clipped_state(*inputs: torch.Tensor) -> Outputs:
    """Token by token, the state kept within -3 ... 3."""
    q, k, v, g, beta = prepared(*inputs)
    state, rows = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        one = slice(t, t + 1)
        _, state = token_delta_rule(q[:, :, one], k[:, :, one], v[:, :, one], g[:, :, one], beta[:, :, one], state)
        state = state.clamp(-3, 3)
        rows.append(q[:, :, one] @ state)
    return torch.cat(rows, 2).transpose(1, 2).bfloat16().contiguous(), state.bfloat16()


def _heads_interleaved(q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    repeats = others[0].shape[2] // k.shape[2]
    return reference(q.repeat(1, 1, repeats, 1), k.repeat(1, 1, repeats, 1), *others)


def _no_epsilon(q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (x / torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).clamp_min(1e-20) for x in (q, k))
    return reference(q, k, *others)


def _beta_on_values_only(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = prepared(*inputs)
    return _heads_first(chunk_delta_rule, q, k, v * beta.unsqueeze(-1), g, torch.ones_like(beta))


def _late_decay(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = inputs
    return reference(q, k, v, torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1), beta)


WRONG = {
    "value head h reads key head h modulo Hk": _heads_interleaved,
    "no epsilon in the norms": _no_epsilon,
    "beta scales the values but not the prediction": _beta_on_values_only,
    "the state decays after the token, not before": _late_decay,
    "g of -10 at least": _weak_resets,
    "the state is kept within -3 and 3": _clipped_state,
}
SECOND = {
    "token by token": _by_token,
    "64 tokens at a time with bfloat16 operands, inverse in float32": _on_tensor_cores(64),
    "32 tokens at a time with bfloat16 operands": _on_tensor_cores(32),
}
