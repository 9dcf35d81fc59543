"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.kv_cache.common import assert_kept, insert, rotate_first, sample, with_inputs

from .problem import reference

INDEPENDENT = "torch's rms_norm and transformers' Glm4Moe rotary embedding in float64; the cache token by token"
NAMES = ("qkv", "positions", "q_weight", "k_weight", "table", "slots", "cache", "eps")


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Both outputs by library functions; slots read back one by one."""
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    qkv, positions, q_weight, k_weight, table, slots, cache, eps = inputs
    kv_heads, dim = cache.shape[3:]
    width = kv_heads * dim
    parts = qkv.double().split((qkv.shape[1] - 2 * width, width, width), dim=1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
    q = torch.nn.functional.rms_norm(q, (dim,), q_weight.double(), eps)
    k = torch.nn.functional.rms_norm(k, (dim,), k_weight.double(), eps)
    cos, sin = table[positions].double().chunk(2, dim=1)
    q, k = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), 1), torch.cat((sin, sin), 1))
    torch.testing.assert_close(truth[0], q, rtol=1e-10, atol=1e-10)
    places = slots.tolist()
    for t in sample(len(places), 64):
        if places[t] >= 0:
            page, place = divmod(places[t], cache.shape[2])
            torch.testing.assert_close(truth[1][0, page, place], k[t], rtol=1e-10, atol=1e-10)
            assert torch.equal(truth[1][1, page, place], v[t])
    for after, before in zip(truth[1], cache, strict=True):
        assert_kept(after.flatten(0, 1), before.flatten(0, 1), [place for place in places if place >= 0])


def _variant(norm: Callable[..., torch.Tensor], turn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The operation with another norm (x, weight, eps, all float32) or rotation (x, rows of the table)."""

    def function(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, positions, q_weight, k_weight, table, slots, cache, eps = inputs
        kv_heads, dim = cache.shape[3:]
        heads = qkv.view(len(qkv), -1, dim)
        count = heads.shape[1] - 2 * kv_heads
        angles = table[positions].unsqueeze(1).float()
        q = turn(norm(heads[:, :count].float(), q_weight.float(), eps), angles)
        k = turn(norm(heads[:, count : count + kv_heads].float(), k_weight.float(), eps), angles)
        v = heads[:, count + kv_heads :]
        return q.bfloat16(), torch.stack((insert(cache[0], slots, k.bfloat16()), insert(cache[1], slots, v)))

    return function


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def _rounded_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    ones = torch.ones_like(weight)
    return (_norm(x, ones, eps).bfloat16().float() * weight).bfloat16().float()


def _turn_neighbours(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Pairs (2j, 2j + 1)."""
    rotary = table.shape[-1]
    halves = torch.cat((x[..., 0:rotary:2], x[..., 1:rotary:2]), dim=-1)
    turned = torch.stack(rotate_first(halves, table).chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., rotary:]), dim=-1)


def _turn_far_pairs(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Pairs (j, j + D / 2)."""
    half = table.shape[-1] // 2
    a, b = x.chunk(2, dim=-1)
    first, second = rotate_first(torch.cat((a[..., :half], b[..., :half]), -1), table).chunk(2, dim=-1)
    return torch.cat((first, a[..., half:], second, b[..., half:]), dim=-1)


def _mean_of_120(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x[..., :120].square().mean(-1, keepdim=True) + eps) * weight


def _wraps(*inputs: Any) -> Any:
    """-1 addresses the last slot."""
    *others, slots, _, eps = inputs
    q, cache = reference(*inputs)
    last = cache[0, ..., 0, 0].numel() - 1
    others += [torch.where(slots < 0, last, -1), cache, eps]
    return q, reference(*others)[1]


WRONG = {
    "no eps": with_inputs(reference, NAMES, eps=lambda given: 0.0),
    "eps of 1e-6": with_inputs(reference, NAMES, eps=lambda given: 1e-6),
    "weight 1 + w": with_inputs(
        reference, NAMES, q_weight=lambda given: given["q_weight"] + 1, k_weight=lambda given: given["k_weight"] + 1
    ),
    "query weight for keys": with_inputs(reference, NAMES, k_weight=lambda given: given["q_weight"]),
    "the token's number for its position": with_inputs(
        reference,
        NAMES,
        positions=lambda given: torch.arange(len(given["qkv"]), device=given["qkv"].device) % len(given["table"]),
    ),
    "-1 wraps to the last slot": _wraps,
    "neighbouring pairs": _variant(_norm, _turn_neighbours),
    "pairs half a head apart": _variant(_norm, _turn_far_pairs),
    "the mean of 120 of the 128 channels": _variant(_mean_of_120, rotate_first),
}
SECOND = {
    "float32 throughout, rounded once": _variant(_norm, rotate_first),
    "norm rounded, rotation in float32": _variant(_rounded_norm, rotate_first),
}
