"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.linear_attention.common import as_bf16, chunk_delta_rule, token_delta_rule
from mkb_env.problems.linear_attention.delta_rule_deltanet_bf16.problem import prepared, reference

INDEPENDENT = "products of I - beta k k^T, token by token in float64, on some heads; transformers' recurrence if small"
Outputs = tuple[torch.Tensor, torch.Tensor]


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """S <- (I - beta k k^T) S + beta k v^T, as a product of matrices."""
    q, k, v, beta, state = (x.double() for x in inputs)
    for b, h in {(0, 0), (len(q) - 1, q.shape[1] - 1), (len(q) // 2, q.shape[1] // 2)}:
        query, key = (torch.nn.functional.normalize(x[b, h], dim=-1, eps=1e-12) for x in (q, k))
        now, rows = state[b, h], []
        identity = torch.eye(q.shape[-1], dtype=torch.float64, device=q.device)
        for t in range(q.shape[2]):
            weighted = beta[b, h, t] * key[t, :, None]
            now = (identity - weighted * key[t]) @ now + weighted * v[b, h, t]
            rows.append(query[t] @ now / q.shape[-1] ** 0.5)
        torch.testing.assert_close(truth[0][b, h], torch.stack(rows), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(truth[1][b, h], now, rtol=1e-9, atol=1e-11)
    if truth[0].numel() <= 1 << 14:
        _against_transformers(inputs, truth)


def _against_transformers(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, beta, state = (x.float() for x in inputs)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    tokens = (x.transpose(1, 2) for x in (q, k, v, torch.zeros_like(beta), beta))
    o, last = torch_recurrent_gated_delta_rule(*tokens, initial_state=state, output_final_state=True)
    torch.testing.assert_close(o.transpose(1, 2).double(), truth[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.double(), truth[1], rtol=1e-4, atol=1e-5)


def _rounded(rule: Callable[..., Outputs], *arguments: torch.Tensor) -> Outputs:
    o, state = rule(*arguments)
    return o.bfloat16().contiguous(), state.bfloat16()


def _on_tensor_cores(chunk: int) -> Callable[..., Outputs]:
    def function(*inputs: torch.Tensor) -> Outputs:
        q, k, *others = prepared(*inputs)
        o, state = chunk_delta_rule(as_bf16(q), as_bf16(k), *others, chunk=chunk, operand=as_bf16)
        return o.bfloat16().contiguous(), state.bfloat16()

    return function


def _beta_on_values_only(*inputs: torch.Tensor) -> Outputs:
    q, k, v, g, beta, state = prepared(*inputs)
    return _rounded(chunk_delta_rule, q, k, v * beta.unsqueeze(-1), g, torch.ones_like(beta), state)


def _value_major(*inputs: torch.Tensor) -> Outputs:
    q, k, v, beta, state = inputs
    o, last = reference(q, k, v, beta, state.mT)
    return o, last.mT.contiguous()


def _predicted_by_chunk(*inputs: torch.Tensor) -> Outputs:
    """All 16 tokens of a group are held against the state before the group."""
    q, k, v, _, beta, state = prepared(*inputs)
    o = torch.empty_like(v)
    for begin in range(0, q.shape[2], 16):
        part = slice(begin, begin + 16)
        keys = k[:, :, part]
        new = beta[:, :, part, None] * (v[:, :, part] - keys @ state)
        o[:, :, part] = q[:, :, part] @ state + (q[:, :, part] @ keys.mT).tril() @ new
        state = state + keys.mT @ new
    return o.bfloat16(), state.bfloat16()


WRONG = {
    "beta scales the values but not the prediction": _beta_on_values_only,
    "states are read and written value-major": _value_major,
    "tokens of a group do not see each other's corrections": _predicted_by_chunk,
    "keys are not normalised, queries are": lambda q, k, *others: _rounded(
        chunk_delta_rule, prepared(q, k, *others)[0], k.float() / k.shape[-1] ** 0.5, *prepared(q, k, *others)[2:]
    ),
}
SECOND = {
    "token by token": lambda *inputs: _rounded(token_delta_rule, *prepared(*inputs)),
    "64 tokens at a time with bfloat16 operands, inverse in float32": _on_tensor_cores(64),
    "16 tokens at a time with bfloat16 operands": _on_tensor_cores(16),
}
