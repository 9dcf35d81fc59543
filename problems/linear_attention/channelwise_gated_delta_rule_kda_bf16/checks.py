"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.linear_attention.channelwise_gated_delta_rule_kda_bf16.problem import prepared, reference
from mkb_env.problems.linear_attention.common import as_bf16, chunk_channel_rule, same, token_delta_rule

INDEPENDENT = (
    "one triangular system over the whole sequence, float64, some heads; transformers' Kimi recurrence if small"
)


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The corrections of all tokens from one system whose entries are sums over channels, decays from differences."""
    q, k, v, g, beta = (x.double() for x in inputs)
    repeats = v.shape[2] // k.shape[2]
    for b, h in {(0, 0), (len(q) - 1, v.shape[2] - 1), (len(q) // 2, v.shape[2] // 2)}:
        query, key = (torch.nn.functional.normalize(x[b, :, h // repeats], dim=-1, eps=1e-12) for x in (q, k))
        sums = g[b, :, h].cumsum(0)
        decay = (sums[:, None] - sums[None]).clamp_max(0).exp()
        overlap = torch.einsum("ic,jc,ijc->ij", key, key, decay).tril(-1) * beta[b, :, h, None]
        system = torch.eye(len(sums), dtype=torch.float64, device=q.device) + overlap
        new = torch.linalg.solve(system, beta[b, :, h, None] * v[b, :, h])
        want = torch.einsum("ic,jc,ijc->ij", query, key, decay).tril() @ new / q.shape[-1] ** 0.5
        torch.testing.assert_close(truth[0][b, :, h], want, rtol=1e-9, atol=1e-12)
    if truth[0].numel() <= 1 << 14:
        _against_transformers(inputs, truth)


def _against_transformers(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    q, k, v, g, beta = (x.float() for x in inputs)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    o, _ = recurrent_kimi_delta_attention(q, k, v, g, beta, None, False)
    torch.testing.assert_close(o.double(), truth[0], rtol=1e-4, atol=1e-5)


def _chunked(chunk: int, operand: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, *others = prepared(*inputs)
        o = chunk_channel_rule(operand(q), operand(k), *others, chunk=chunk, operand=operand)
        return o.transpose(1, 2).bfloat16().contiguous()

    return function


def _by_token(*inputs: torch.Tensor) -> torch.Tensor:
    q, k, v, g, beta = prepared(*inputs)
    o, _ = token_delta_rule(q, k, v, g, beta, q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]))
    return o.transpose(1, 2).bfloat16().contiguous()


def _groups_start_empty(*inputs: torch.Tensor) -> torch.Tensor:
    """The state is forgotten every 64 tokens."""
    groups = zip(*(x.split(64, dim=1) for x in inputs), strict=True)
    return torch.cat([reference(*group) for group in groups], 1)


def _late_decay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return reference(q, k, v, torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1), beta)


def _mean_decay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return reference(q, k, v, g.float().mean(-1, keepdim=True).expand(g.shape), beta)


def _beta_on_values_only(*inputs: torch.Tensor) -> torch.Tensor:
    q, k, v, g, beta = prepared(*inputs)
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    o, _ = token_delta_rule(q, k, v * beta.unsqueeze(-1), g, torch.ones_like(beta), state)
    return o.transpose(1, 2).bfloat16().contiguous()


def _no_correction(*inputs: torch.Tensor) -> torch.Tensor:
    """Plain gated linear attention."""
    q, k, v, g, beta = prepared(*inputs)
    o = chunk_channel_rule(q, k, v * beta.unsqueeze(-1), g, None, chunk=16)
    return o.transpose(1, 2).bfloat16().contiguous()


WRONG = {
    "the state decays after the token, not before": _late_decay,
    "one decay for all channels of a head": _mean_decay,
    "beta scales the values but not the prediction": _beta_on_values_only,
    "the prediction is not subtracted": _no_correction,
    "the state is forgotten every 64 tokens": _groups_start_empty,
    "keys divided by the decays of 64 tokens": _chunked(64, same),
}
SECOND = {
    "token by token": _by_token,
    "8 tokens at a time": _chunked(8, same),
    "16 tokens at a time with bfloat16 operands, inverse in float32": _chunked(16, as_bf16),
}
