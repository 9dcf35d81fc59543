"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

EPS = 1e-6
INDEPENDENT = "torch.nn.functional.embedding and rms_norm in float64, position by position"
SAMPLE = 64
"""Positions per sequence that are looked at, of long sequences."""


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """Sampled positions, the ends included, each with its token looked up from a Python list."""
    input_ids, embedding, hidden, enorm, hnorm = inputs
    batch, length, channels = hidden.shape
    sample = sorted({*range(0, length, max(1, length // SAMPLE)), length - 1, max(0, length - 2)})
    for b in range(batch):
        followed_by = [*input_ids[b].tolist()[1:], 0]
        ids = torch.tensor([followed_by[s] for s in sample], device=hidden.device)
        rows = torch.nn.functional.embedding(ids, embedding).double(), hidden[b, sample].double()
        for half, (row, weight) in enumerate(zip(rows, (enorm, hnorm), strict=True)):
            want = torch.nn.functional.rms_norm(row, (channels,), weight.double(), eps=EPS)
            got = truth[0][b, sample, half * channels : (half + 1) * channels]
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def _following(input_ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(input_ids[:, 1:], (0, 1))


def _norm(rows: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """One rounding, and the mean from 8 interleaved partial sums."""
    t = rows.float()
    mean = t.square().unflatten(-1, (-1, 8)).sum(-2).sum(-1, keepdim=True) / t.shape[-1]
    return (t / torch.sqrt(mean + eps) * weight.float()).to(rows.dtype)


def _one_rounding(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    enorm: torch.Tensor,
    hnorm: torch.Tensor,
    *,
    eps: float = EPS,
) -> torch.Tensor:
    return torch.cat((_norm(embedding[_following(input_ids)], enorm, eps), _norm(hidden, hnorm, eps)), dim=-1)


def _with_rows(
    rows: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor, enorm: torch.Tensor, hnorm: torch.Tensor
) -> torch.Tensor:
    """The right norms of ``rows`` of the table."""
    return torch.cat((_norm(embedding[rows], enorm), _norm(hidden, hnorm)), dim=-1)


def _across_sequences(input_ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The ids as one flat list, shifted: a sequence's last position sees the next sequence's first token."""
    return _with_rows(_following(input_ids.view(1, -1)).view(input_ids.shape), *others)


def _wrong_way(input_ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return _with_rows(torch.nn.functional.pad(input_ids[:, :-1], (1, 0)), *others)


def _zero_at_the_end(input_ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    out = _one_rounding(input_ids, *others)
    out[:, -1, : out.shape[-1] // 2] = 0.0
    return out


def _hidden_first(*inputs: torch.Tensor) -> torch.Tensor:
    return torch.cat(_one_rounding(*inputs).chunk(2, dim=-1)[::-1], dim=-1)


WRONG = {
    "the shift runs on into the next sequence": _across_sequences,
    "shifted the other way": _wrong_way,
    "a zero vector in place of row 0 at the end": _zero_at_the_end,
    "hidden states first": _hidden_first,
    "the two weights exchanged": lambda ids, table, hidden, e, h: _one_rounding(ids, table, hidden, h, e),
    "epsilon 1e-5": lambda *inputs: _one_rounding(*inputs, eps=1e-5),
    "no epsilon": lambda *inputs: _one_rounding(*inputs, eps=0.0),
}
SECOND = {"one rounding, partial sums, division by a square root": _one_rounding}
