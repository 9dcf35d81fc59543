"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.kv_cache.common import assert_kept, finite_e4m3_values, insert, sample

from .problem import reference

INDEPENDENT = "nearest entry of the table of all finite codes (either neighbour within 1e-7 of a tie), token by token"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Up to 64 tokens by search in the table; untouched slots."""
    slots, size = inputs[2].tolist(), inputs[3].shape[1]
    table = finite_e4m3_values(inputs[0].device)
    middles = (table[1:] + table[:-1]) / 2
    for rows, codes, scales in zip(inputs[:2], truth[:2], truth[2:], strict=True):
        for t in sample(len(slots), 64):
            if slots[t] < 0:
                continue
            page, place = divmod(slots[t], size)
            x = rows[t].double()
            scale = torch.maximum(x.abs().amax(-1, keepdim=True) / 448, torch.full_like(x[:, :1], 1e-6))
            torch.testing.assert_close(scales[page, place], scale[:, 0], rtol=1e-12, atol=0)
            scaled = (x.abs() * (1 / scale)).clamp(max=448)
            nearest, got = torch.bucketize(scaled, middles), codes[page, place].long()
            assert torch.equal(got >= 128, x.signbit()), f"signs of token {t} differ"
            tie = middles[torch.minimum(nearest, got % 128).clamp(max=len(middles) - 1)]
            neighbour = ((nearest - got % 128).abs() == 1) & ((scaled - tie).abs() <= 1e-7 * tie)
            assert bool((neighbour | (nearest == got % 128)).all()), f"codes of token {t} differ"
    written = [slot for slot in slots if slot >= 0]
    for after, before in zip(truth, inputs[3:], strict=True):
        assert_kept(after.flatten(0, 1), before.flatten(0, 1), written)


def _variant(
    scales_of: Callable[[torch.Tensor], torch.Tensor],
    codes_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    stored: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> Callable[..., Any]:
    """The operation with other scales [T, H] of float32 rows, other codes of rows and scales, other scales stored."""

    def function(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, *caches: torch.Tensor) -> Any:
        scales = [scales_of(rows.float()) for rows in (key, value)]
        codes = [codes_of(rows.float(), s.unsqueeze(-1)) for rows, s in zip((key, value), scales, strict=True)]
        rows = (*codes, *(stored(s) for s in scales))
        return tuple(insert(cache, slots, new) for cache, new in zip(caches, rows, strict=True))

    return function


def _scales(x: torch.Tensor) -> torch.Tensor:
    """Maximum by halves, times the reciprocal of 448, as a GPU divides by a constant."""
    while x.shape[-1] % 2 == 0:
        x = torch.maximum(*x.abs().chunk(2, dim=-1))
    return (x.abs().amax(-1) * torch.tensor(1 / 448)).clamp(min=1e-6)


def _codes(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _bytes((x * scales.reciprocal()).clamp(-448, 448))


def _bytes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def _divided(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _bytes((x / scales).clamp(-448, 448))


def _towards_zero(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Cuts the mantissa of normal numbers to three bits."""
    scaled = (x / scales).clamp(-448, 448)
    cut = (scaled.contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)
    return _bytes(torch.where(scaled.abs() >= 2.0**-6, cut, scaled))


def _flushed(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scaled = (x / scales).clamp(-448, 448)
    return _bytes(torch.where(scaled.abs() < 2.0**-6, 0.0 * scaled, scaled))


def _nan_at_the_top(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The largest code one too high."""
    codes = _codes(x, scales)
    return codes + ((codes & 0x7F) == 0x7E).to(torch.uint8)


def _wraps(*inputs: torch.Tensor) -> Any:
    """-1 addresses the last slot."""
    key, value, slots, *_ = inputs
    caches = reference(*inputs)
    return reference(key, value, torch.where(slots < 0, caches[2][..., 0].numel() - 1, -1), *caches)


WRONG = {
    "one scale per token": _variant(lambda x: _scales(x.flatten(1)).unsqueeze(1).expand(x.shape[:2]), _codes),
    "no floor of the scale": _variant(lambda x: (x.abs().amax(-1) / 448).clamp(min=1e-12), _codes),
    "a largest value of 240": _variant(lambda x: _scales(x) * (448 / 240), _codes),
    "scales rounded to bfloat16": _variant(lambda x: _scales(x).bfloat16().float(), _codes),
    "the reciprocal is stored": _variant(_scales, _codes, torch.reciprocal),
    "rounding towards zero": _variant(_scales, _towards_zero),
    "subnormal codes flushed": _variant(_scales, _flushed),
    "the row's largest becomes NaN": _variant(_scales, _nan_at_the_top),
    "-1 wraps to the last slot": _wraps,
}
SECOND = {
    "times 1/448, maximum by halves": _variant(_scales, _codes),
    "division by the scale": _variant(lambda x: (x.abs().amax(-1) / 448).clamp(min=1e-6), _divided),
}
