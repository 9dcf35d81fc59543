"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.kv_cache.common import assert_kept, insert, rotate_as_complex, rotate_first, sample, with_inputs

from .problem import EPS, insert_by_head, reference

INDEPENDENT = "torch's rms_norm with weight 1 + w and rotation by complex numbers, float64; slots read back one by one"
NAMES = (
    "qkv", "q_weight", "k_weight", "iq_weight", "ik_weight", "positions", "table", "slots", "index_slots", "cache",
    "index_cache", "heads",
)  # fmt: skip


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Up to 200 tokens by library functions; untouched slots of both caches."""
    given = dict(zip(NAMES, inputs, strict=True))
    dim, kv_heads, size = given["index_cache"].shape[2], given["cache"].shape[1], given["cache"].shape[2]
    slots, index_slots = given["slots"].tolist(), given["index_slots"].tolist()
    chosen = sample(len(slots), 200)
    angles = given["table"][given["positions"][chosen]].double().unsqueeze(1)
    heads = given["qkv"][chosen].double().unflatten(1, (-1, dim))

    def turned(begin: int, end: int, weight: str) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(heads[:, begin:end], (dim,), 1 + given[weight].double(), EPS)
        count = angles.shape[-1]
        return torch.cat((rotate_as_complex(y[..., :count], angles.expand(-1, end - begin, -1)), y[..., count:]), -1)

    key, last = given["heads"], heads.shape[1] - 1
    index = key + 2 * kv_heads
    torch.testing.assert_close(truth[0][chosen], turned(0, key, "q_weight"), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(truth[1][chosen], turned(index, last, "iq_weight"), rtol=1e-10, atol=1e-10)
    keys, index_keys = turned(key, key + kv_heads, "k_weight"), turned(last, last + 1, "ik_weight")
    for row, t in enumerate(chosen):
        if slots[t] >= 0:
            got = truth[2][slots[t] // size, :, slots[t] % size]
            torch.testing.assert_close(got[:, :dim], keys[row], rtol=1e-10, atol=1e-10)
            assert torch.equal(got[:, dim:], heads[row, key + kv_heads : index])
        if index_slots[t] >= 0:
            got = truth[3].flatten(0, 1)[index_slots[t]]
            torch.testing.assert_close(got, index_keys[row, 0], rtol=1e-10, atol=1e-10)
    after, before = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (truth[2], given["cache"]))
    assert_kept(after, before, [slot for slot in slots if slot >= 0])
    written = [slot for slot in index_slots if slot >= 0]
    assert_kept(truth[3].flatten(0, 1), given["index_cache"].flatten(0, 1), written)


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS) * (1 + weight)


def _variant(norm: Step = _norm, turn: Step = rotate_first) -> Callable[..., Any]:
    """The operation with another norm (x, weight) or rotation (x, rows of the table), all in float32."""

    def function(*inputs: Any) -> Any:
        given = dict(zip(NAMES, inputs, strict=True))
        count, kv_heads = given["heads"], given["cache"].shape[1]
        heads = given["qkv"].unflatten(1, (-1, given["index_cache"].shape[2]))
        sizes = (count, kv_heads, kv_heads, heads.shape[1] - count - 2 * kv_heads - 1, 1)
        q, k, v, index_q, index_k = heads.split(sizes, dim=1)
        table = given["table"][given["positions"]].float().unsqueeze(1)
        q, k, index_q, index_k = (
            turn(norm(x.float(), given[w].float()), table).bfloat16()
            for x, w in ((q, "q_weight"), (k, "k_weight"), (index_q, "iq_weight"), (index_k, "ik_weight"))
        )
        cache = insert_by_head(given["cache"], given["slots"], torch.cat((k, v), dim=-1))
        return q, index_q, cache, insert(given["index_cache"], given["index_slots"], index_k.squeeze(1))

    return function


def _wraps(*inputs: Any) -> Any:
    """-1 addresses the last slot of the index cache."""
    outputs = reference(*inputs)
    again = (*inputs[:8], torch.where(inputs[8] < 0, outputs[3][..., 0].numel() - 1, -1), *outputs[2:], inputs[11])
    return *outputs[:3], reference(*again)[3]


def _value_first(*inputs: Any) -> Any:
    """Rows of the cache hold the value, then the key."""
    *others, cache, index_cache, heads = inputs
    others += [cache.roll(cache.shape[3] // 2, -1), index_cache, heads]
    q, index_q, new, new_index = reference(*others)
    return q, index_q, new.roll(new.shape[3] // 2, -1), new_index


WRONG = {
    "weight w": _variant(norm=lambda x, weight: _norm(x, weight - 1)),
    "no 1e-6": _variant(norm=lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(1e-30)) * (1 + w)),
    "the mean of 120 of the 128 channels": _variant(norm=lambda x, w: _norm(x, w) * _norm_ratio(x)),
    "the key's weight for the index key": with_inputs(reference, NAMES, ik_weight=lambda given: given["k_weight"]),
    "the main slots for the index cache": with_inputs(reference, NAMES, index_slots=lambda given: given["slots"]),
    "-1 in one mapping skips both writes": with_inputs(
        reference, NAMES, index_slots=lambda given: torch.where(given["slots"] < 0, -1, given["index_slots"])
    ),
    "-1 wraps to the last slot": _wraps,
    "value before key": _value_first,
    "rotation the other way": _variant(turn=lambda x, table: rotate_first(x, table * _signs(table))),
}
SECOND = {
    "float32 throughout, rounded once": _variant(),
    "norm rounded, rotation in float32": _variant(norm=lambda x, weight: _norm(x, weight).bfloat16().float()),
}


def _norm_ratio(x: torch.Tensor) -> torch.Tensor:
    """What a norm over the first 120 channels is to one over all."""
    means = (part.square().mean(-1, keepdim=True) + EPS for part in (x, x[..., :120]))
    return torch.sqrt(next(means) / next(means))


def _signs(table: torch.Tensor) -> torch.Tensor:
    """1 for cosines, -1 for sines."""
    half = table.shape[-1] // 2
    return torch.cat((table.new_ones(half), -table.new_ones(half)))
