"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mkb_env.problems.quantized_projection import common, oracle
from mkb_env.problems.quantized_projection.quantized_attention_scores_qwen3_14b_nvfp4.problem import visible

INDEPENDENT = "row by row over exactly the visible keys, tensors by exhaustive e2m1 and e4m3 tables, float64"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against rows computed one by one, without a mask: at most 48, the first and the last included."""
    q, k = oracle.fp4(*inputs[:3]), oracle.fp4(*inputs[3:])
    oracle.check_fp4(q.device)
    batch, heads, queries, width = q.shape
    rows = oracle.sample(batch * heads * queries, 48, q.device).tolist()
    for row in {*rows, 0, batch * heads * queries - 1}:
        b, h, i = row // (heads * queries), row // queries % heads, row % queries
        seen = k[b, h * k.shape[1] // heads, : i + 1 + k.shape[2] - queries]
        z = (seen * q[b, h, i]).sum(dim=1) / width**0.5
        got = truth[0][b, h, i]
        torch.testing.assert_close(got[: len(seen)], z, rtol=1e-9, atol=1e-11)
        assert not got[len(seen) :].any(), f"query {i} has scores of keys that it does not see"
        want = z.max() + (z - z.max()).exp().sum().log()
        torch.testing.assert_close(truth[1][b, h, i], want, rtol=1e-12, atol=1e-12)


Scores = tuple[torch.Tensor, torch.Tensor]


def _logits(inputs: Sequence[torch.Tensor], in_turn: bool = False) -> torch.Tensor:
    """Unmasked z of all pairs, float32; ``in_turn``: query head h reads key head h % Hk."""
    q, k = (common.fp4_values(inputs[i], inputs[i + 1], torch.float32) for i in (0, 3))
    shared = q.shape[1] // k.shape[1]
    k = k.repeat(1, shared, 1, 1) if in_turn else k.repeat_interleave(shared, dim=1)
    return (q @ k.transpose(-1, -2)) * (inputs[2] * inputs[5] / q.shape[-1] ** 0.5)


def _finish(z: torch.Tensor, later: int = 0, in_lse: float = -torch.inf, unseen: float = 0.0) -> Scores:
    """``later``: keys beyond the causal bound that are visible, too."""
    seen = torch.ones(z.shape[2:], dtype=torch.bool, device=z.device).tril(z.shape[3] - z.shape[2] + later)
    return torch.where(seen, z, unseen).bfloat16(), torch.where(seen, z, in_lse).logsumexp(dim=-1)


def _online(*inputs: torch.Tensor) -> Scores:
    """Exponentials of base 2, 64 keys at a time, with a running maximum; a start that is finite."""
    z = _logits(inputs)
    seen = visible(z.shape[2], z.shape[3], z.device)
    largest, total = z.new_full(z.shape[:3], -1e30), z.new_zeros(z.shape[:3])
    for logits, part in zip(z.split(64, -1), seen.split(64, -1), strict=True):
        logits = torch.where(part, logits * 1.44269504, -torch.inf)
        now = torch.maximum(largest, logits.amax(dim=-1))
        total = total * torch.exp2(largest - now) + torch.exp2(logits - now.unsqueeze(-1)).sum(dim=-1)
        largest = now
    return _finish(z)[0], (largest + total.log2()) * 0.69314718


def _reversed_sums(*inputs: torch.Tensor) -> Scores:
    """Dot products as 16 partial sums, last channels first."""
    q, k = (common.fp4_values(inputs[i], inputs[i + 1], torch.float32) for i in (0, 3))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    z = torch.zeros(*q.shape[:3], k.shape[2], device=q.device)
    for a, b in zip(q.split(16, -1)[::-1], k.split(16, -1)[::-1], strict=True):
        z += a @ b.transpose(-1, -2)
    return _finish(z * (inputs[2] * inputs[5] * q.shape[-1] ** -0.5))


def _swapped(*inputs: torch.Tensor) -> Scores:
    return _finish(_logits([inputs[0] << 4 | inputs[0] >> 4, *inputs[1:]]))


def _lse_of_rounded(*inputs: torch.Tensor) -> Scores:
    return _finish(_logits(inputs).bfloat16().float())


WRONG = {
    "high nibble of queries first": _swapped,
    "one key too many": lambda *inputs: _finish(_logits(inputs), later=1),
    "masked keys count as 0 in lse": lambda *inputs: _finish(_logits(inputs), in_lse=0.0),
    "masked scores of -inf": lambda *inputs: _finish(_logits(inputs), unseen=-torch.inf),
    "key heads taken in turn": lambda *inputs: _finish(_logits(inputs, in_turn=True)),
    "no factor of the keys": lambda *inputs: _finish(_logits([*inputs[:5], torch.ones_like(inputs[5])])),
    "lse of rounded scores": _lse_of_rounded,
}
SECOND = {"lse in base 2, 64 keys at a time": _online, "16 partial sums, last channels first": _reversed_sums}
