"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.moe.capacity_factor_expert_dispatch_qwen3_coder_480b_bf16.problem import accept, dispatch
from mkb_env.problems.moe.common import best, choose_by_sorting

INDEPENDENT = "a queue walked entry by entry in Python, weights by math.exp and math.fsum, rows looked up slot by slot"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The whole queue at any size; of large buffers the rows of every 64th slot."""
    hidden, logits, k, capacity = inputs
    buffer, combine_w, slot, counts = truth
    experts, rows = logits.shape[1], logits.double().tolist()
    chosen = [choose_by_sorting(row, k) for row in rows]
    taken, owner = [0] * experts, [-1] * (experts * capacity)
    want_slot = [[-1] * k for _ in rows]
    for j in range(k):
        for t, choices in enumerate(chosen):
            expert, place = choices[j], taken[choices[j]]
            taken[expert] += 1
            if place < capacity:
                want_slot[t][j] = expert * capacity + place
                owner[want_slot[t][j]] = t
    assert slot.tolist() == want_slot, "slots differ"
    assert counts.tolist() == taken, "counts differ"
    want_w = []
    for row, choices, slots in zip(rows, chosen, want_slot, strict=True):
        total = math.fsum(math.exp(row[e]) for e in choices)
        want_w.append([math.exp(row[e]) / total if s >= 0 else 0.0 for e, s in zip(choices, slots, strict=True)])
    torch.testing.assert_close(combine_w.cpu(), torch.tensor(want_w, dtype=torch.float64), rtol=1e-12, atol=0)
    step = 1 if buffer.numel() < 1 << 20 else 64
    owners = torch.tensor(owner[::step], device=hidden.device)
    want = torch.where(owners.unsqueeze(1) < 0, 0.0, hidden[owners.clamp(min=0)].double())
    assert torch.equal(buffer.flatten(0, 1)[::step], want), "buffer differs"


def _variant(
    slots: Callable[..., tuple[torch.Tensor, torch.Tensor]] = accept,
    copied: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
    renormalised: bool = False,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Dispatch with weights by a softmax over the chosen logits alone, in base 2, and one thing changed."""

    def run(hidden: torch.Tensor, logits: torch.Tensor, k: int, capacity: int) -> tuple[torch.Tensor, ...]:
        experts, chosen = logits.shape[1], best(logits, k)
        picked = logits.gather(-1, chosen) * 1.4426950408889634
        w = torch.exp2(picked - picked[:, :1])
        w = w / w.sum(-1, keepdim=True)
        slot, counts = slots(chosen, experts, capacity)
        w = torch.where(slot >= 0, w, 0.0)
        if renormalised:
            w = w / w.sum(-1, keepdim=True).clamp(min=1e-20)
        buffer = dispatch(copied(hidden), slot, experts * capacity).view(experts, capacity, -1)
        return buffer, w.contiguous(), slot.int().contiguous(), counts.int()

    return run


def _token_major(chosen: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    slot, counts = accept(chosen.reshape(-1, 1), experts, capacity)
    return slot.view(chosen.shape), counts


def _kept_counts(chosen: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    slot, counts = accept(chosen, experts, capacity)
    return slot, counts.clamp(max=capacity)


def _one_too_many(chosen: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last place of every expert is refused."""
    slot, counts = accept(chosen, experts, capacity)
    return torch.where(slot % capacity == capacity - 1, -1, slot), counts


def _by_sorting(chosen: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places from a stable sort of the queue and the beginning of each expert's run."""
    queue = chosen.T.flatten()
    order, counts = queue.argsort(stable=True), queue.bincount(minlength=experts)
    place = torch.empty_like(queue)
    place[order] = torch.arange(len(queue), device=queue.device) - (counts.cumsum(0) - counts)[queue[order]]
    return torch.where(place < capacity, queue * capacity + place, -1).view(chosen.T.shape).T, counts


WRONG = {
    "the queue in token order": _variant(_token_major),
    "counts after dropping": _variant(_kept_counts),
    "one place short": _variant(_one_too_many),
    "weights renormalised after dropping": _variant(renormalised=True),
    "rows that lost their last bit": _variant(copied=lambda h: (h.view(torch.int16) & -2).view(torch.bfloat16)),
}
SECOND = {
    "softmax over the chosen logits in base 2": _variant(),
    "places by a stable sort": _variant(_by_sorting),
}
