"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.attention import variants
from mkb_env.problems.attention.common import Attend, attend_requests
from mkb_env.problems.attention.dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64_bf16.problem import reference
from mkb_env.problems.attention.variants import INDEPENDENT as INDEPENDENT
from mkb_env.problems.attention.variants import blocked
from mkb_env.problems.drawing import offsets

COUNTED = (0.3, 1.0)
"""The reference multiplies every entry of a list, those that are -1 too."""


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's operator, token by token, with lists read entry by entry."""
    q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale = inputs
    q, values = torch.cat((q_nope, q_pe), dim=-1), ckv_cache.flatten(0, 1)[:, None]
    keys = torch.cat((ckv_cache, kpe_cache), dim=-1).flatten(0, 1)[:, None]
    lists = [[entry for entry in entries if entry != -1] for entries in sparse_indices.tolist()]
    for slots in lists:
        assert len(set(slots)) == len(slots), "a slot is listed twice"
    queries = [(t, t + 1) for t in range(len(q))]
    variants.check_requests(q, keys, values, queries, lists.__getitem__, sm_scale, truth)


def _until_first_gap(entries: torch.Tensor) -> torch.Tensor:
    """What follows a list's first -1 is not read."""
    return entries.masked_fill((entries < 0).cumsum(dim=1) > 0, -1)


def _gaps_as_a_row(entries: torch.Tensor) -> torch.Tensor:
    """-1 stands for the highest slot of the list, which then counts many times."""
    return torch.where(entries < 0, entries.amax(dim=1, keepdim=True), entries)


def _by_token(attention: Attend) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``attention`` of one token after another over the rows of its list."""

    def function(
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        sparse_indices: torch.Tensor,
        sm_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, values = torch.cat((q_nope, q_pe), dim=-1), ckv_cache.flatten(0, 1)[:, None]
        keys = torch.cat((ckv_cache, kpe_cache), dim=-1).flatten(0, 1)[:, None]
        present = sparse_indices >= 0
        ends = offsets(present.sum(dim=1).tolist())
        requests = [(slice(t, t + 1), slice(*bounds)) for t, bounds in enumerate(pairwise(ends))]
        return attend_requests(q, keys, values, requests, sm_scale, attention, sparse_indices[present].long())

    return function


WRONG = {
    "no maximum subtracted": _by_token(blocked(shifted=False)),
    "what follows a list's first -1 left out": variants.altered(reference, _until_first_gap, 4),
    "-1 taken as a row": variants.altered(reference, _gaps_as_a_row, 4),
    "no rotary channels in the logits": variants.altered(reference, torch.zeros_like, 1),
    "scale of 576 channels": variants.altered(reference, lambda _: 576**-0.5, -1),
    "the last entry left out": _by_token(blocked(visible=variants.without_own)),
    "NaN for lists without an entry": lambda *inputs: variants.nan_in_empty(reference(*inputs)),
    "lse to base e": lambda *inputs: variants.natural_lse(reference(*inputs)),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": _by_token(blocked()),
    "blocks of 16 keys, fp32 probabilities": _by_token(blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": _by_token(blocked(16, split=True)),
}
