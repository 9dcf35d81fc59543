"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.linear_attention.common import as_bf16, same, scan_within, segment_sums
from mkb_env.problems.linear_attention.mamba2_intra_chunk_diagonal_nemotron_nano_bf16.problem import (
    prepared,
    reference,
)

INDEPENDENT = (
    "a recurrence that restarts at each chunk, float64; transformers' Mamba-2 scan of single chunks, small sizes"
)


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """A state per head, carried from token to token and read, in place of the dual form."""
    x, delta, dA, Bm, Cm = (part.double() for part in inputs)
    repeats = x.shape[3] // Bm.shape[3]
    for h in {0, x.shape[3] // 2 - 1, x.shape[3] - 1}:
        g, rows = h // repeats, []
        state = x.new_zeros(*x.shape[:2], x.shape[-1], Bm.shape[-1])
        for t in range(x.shape[2]):
            entering = x[:, :, t, h] * delta[:, :, t, h, None]
            state = state * dA[:, :, t, h, None, None].exp() + entering[..., None] * Bm[:, :, t, g, None]
            rows.append((state @ Cm[:, :, t, g, :, None]).squeeze(-1))
        torch.testing.assert_close(truth[0][:, :, :, h], torch.stack(rows, 2), rtol=1e-9, atol=1e-11)
    if truth[0].numel() <= 1 << 14:
        _against_transformers(inputs, truth)


def _against_transformers(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """A rate of dA / delta differs from head to head only, so it serves as A; each chunk is a sequence of its own."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, delta, dA, Bm, Cm = (part.float().flatten(0, 1) for part in inputs)
    y = mamba2_chunk_scan(x, delta, (dA / delta).mean(dim=(0, 1)), Bm, Cm, chunk_size=x.shape[1])
    torch.testing.assert_close(y.view(truth[0].shape).double(), truth[0], rtol=1e-4, atol=1e-5)


def _weighed(operand: Callable[[torch.Tensor], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    x, delta, dA, Bm, Cm = inputs
    scaled, alpha, entries, exits = prepared(x, delta, dA, Bm, Cm)
    return scan_within(scaled, segment_sums(alpha), entries, exits, operand=operand).permute(0, 2, 3, 1, 4).bfloat16()


def _by_differences(operand: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decays from running sums, which are cut where they would be positive; the time step is on the weights."""

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        x, delta, dA, Bm, Cm = (part.float() for part in inputs)
        sums = dA.cumsum(2).permute(0, 3, 1, 2)
        decay = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).clamp_max(0).exp().tril()
        scores = torch.einsum("bclgn,bcsgn->bgcls", Cm, Bm).repeat_interleave(x.shape[3] // Bm.shape[3], dim=1)
        weights = scores * decay * delta.permute(0, 3, 1, 2).unsqueeze(-2)
        y = operand(weights) @ operand(x.permute(0, 3, 1, 2, 4))
        return y.permute(0, 2, 3, 1, 4).bfloat16().contiguous()

    return function


def _decay_of_source(
    x: torch.Tensor, delta: torch.Tensor, dA: torch.Tensor, Bm: torch.Tensor, Cm: torch.Tensor
) -> torch.Tensor:
    """The sum of dA begins with s itself."""
    return reference(x, delta * dA.exp(), dA, Bm, Cm)


def _delta_twice(
    x: torch.Tensor, delta: torch.Tensor, dA: torch.Tensor, Bm: torch.Tensor, Cm: torch.Tensor
) -> torch.Tensor:
    return reference(x, delta.square(), dA, Bm, Cm)


def _groups_interleaved(
    x: torch.Tensor, delta: torch.Tensor, dA: torch.Tensor, Bm: torch.Tensor, Cm: torch.Tensor
) -> torch.Tensor:
    repeats = (1, 1, 1, x.shape[3] // Bm.shape[3], 1)
    return reference(x, delta, dA, Bm.repeat(repeats), Cm.repeat(repeats))


def _unmasked(
    x: torch.Tensor, delta: torch.Tensor, dA: torch.Tensor, Bm: torch.Tensor, Cm: torch.Tensor
) -> torch.Tensor:
    """Later positions count with a decay of 1, as if their exponent were cut at 0."""
    scaled, alpha, entries, exits = prepared(x, delta, dA, Bm, Cm)
    sums = segment_sums(alpha).clamp_min(-1e30)
    y = scan_within(scaled, torch.where(sums == -1e30, 0.0, sums), entries, exits)
    return y.permute(0, 2, 3, 1, 4).bfloat16().contiguous()


WRONG = {
    "the decay of the source token counts": _decay_of_source,
    "delta multiplies twice": _delta_twice,
    "head h reads group h modulo G": _groups_interleaved,
    "later positions are not masked": _unmasked,
}
SECOND = {
    "bfloat16 operands": lambda *inputs: _weighed(as_bf16, *inputs).contiguous(),
    "differences of running sums": _by_differences(same),
    "differences of running sums, bfloat16 operands": _by_differences(as_bf16),
}
