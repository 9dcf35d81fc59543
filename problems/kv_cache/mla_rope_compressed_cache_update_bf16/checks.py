"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.kv_cache.common import assert_kept, insert, rotate, rotate_as_complex, sample

from .problem import PLAIN, reference

INDEPENDENT = "tokens one by one: dot products row by row, rotation by complex numbers, slots read back"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Up to 48 tokens by their definition in float64, and all slots that none addresses."""
    rows, weight, positions, table, slots, cache = inputs
    rank, rotary = weight.shape[1], table.shape[1]
    latent = cache.shape[3] - rotary
    places = slots.tolist()
    for t in sample(len(rows), 48):
        row, angles = rows[t].double(), table[positions[t]].double()
        product = (weight.double() * row[:rank]).sum(dim=1).view(-1, PLAIN + rotary)
        turned = rotate_as_complex(product[:, PLAIN:], angles.expand(len(product), -1))
        torch.testing.assert_close(truth[0][t, :, :PLAIN], product[:, :PLAIN], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(truth[0][t, :, PLAIN:], turned, rtol=1e-9, atol=1e-11)
        if places[t] >= 0:
            page, place = divmod(places[t], cache.shape[1])
            written = truth[1][page, place, 0]
            assert torch.equal(written[:latent], row[rank : rank + latent])
            key = rotate_as_complex(row[rank + latent :], angles)
            torch.testing.assert_close(written[latent:], key, rtol=1e-10, atol=1e-12)
    assert_kept(truth[1].flatten(0, 1), cache.flatten(0, 1), [place for place in places if place >= 0])


def _variant(
    rounded: bool = True, begin: int = PLAIN, turn: Callable[..., torch.Tensor] = rotate
) -> Callable[..., Any]:
    """The operation with the rotation in float32, of the product ``rounded`` or not, from channel ``begin`` on."""

    def function(
        rows: torch.Tensor,
        weight: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, rotary = weight.shape[1], table.shape[1]
        cos, sin = table[positions].float().chunk(2, dim=1)
        product = torch.zeros(len(rows), len(weight), device=rows.device)
        for x, w in zip(rows[:, :rank].float().split(32, 1), weight.float().split(32, 1), strict=True):
            product += x @ w.T
        q = (product.bfloat16().float() if rounded else product).view(len(rows), -1, PLAIN + rotary)
        q[..., begin : begin + rotary] = turn(q[..., begin : begin + rotary], cos.unsqueeze(1), sin.unsqueeze(1))
        kv_c, k_pe = rows[:, rank:-rotary], turn(rows[:, -rotary:].float(), cos, sin).bfloat16()
        return q.bfloat16(), insert(cache, slots, torch.cat((kv_c, k_pe), dim=1).unsqueeze(1))

    return function


def _turn_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2j, 2j + 1)."""
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return torch.stack(rotate(halves, cos, sin).chunk(2, dim=-1), dim=-1).flatten(-2)


def _unturned_key(*inputs: Any) -> Any:
    """The key part goes to the cache as it is."""
    rows, weight, *_, slots, cache = inputs
    return reference(*inputs)[0], insert(cache, slots, rows[:, weight.shape[1] :].unsqueeze(1))


def _wraps(*inputs: Any) -> Any:
    """-1 addresses the last slot."""
    *others, slots, _ = inputs
    q, cache = reference(*inputs)
    others += [torch.where(slots < 0, cache[..., 0].numel() - 1, -1), cache]
    return q, reference(*others)[1]


def _no_padded_queries(*inputs: Any) -> Any:
    q, cache = reference(*inputs)
    return q * (inputs[4] >= 0).view(-1, 1, 1), cache


WRONG = {
    "neighbouring pairs": _variant(turn=_turn_neighbours),
    "the first channels of a head rotated": _variant(begin=0),
    "rotation the other way": _variant(turn=lambda x, cos, sin: rotate(x, cos, -sin)),
    "the key part not rotated": _unturned_key,
    "-1 wraps to the last slot": _wraps,
    "no queries for padded tokens": _no_padded_queries,
}
SECOND = {
    "sums of 32 channels, rotation in float32": _variant(),
    "product not rounded before the rotation": _variant(rounded=False),
}
