"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.kv_cache.common import finite_e4m3_values, paged_rows, sample

from .problem import GROUPS, LATENT, ROTARY, reference

INDEPENDENT = "entries taken apart byte by byte with struct, codes by the format's definition; token by token"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Up to 300 rows; zeros with their sign, copied numbers by their bits."""
    cache, block_table, seq_lens = (tensor.cpu() for tensor in inputs)
    table = finite_e4m3_values(cache.device).tolist()
    owners = [(r, p) for r, length in enumerate(seq_lens.tolist()) for p in range(length)]
    assert len(truth[0]) == len(owners)
    for row in sample(len(owners), 300):
        request, place = owners[row]
        entry = cache[block_table[request, place // cache.shape[1]], place % cache.shape[1]].numpy().tobytes()
        codes, scales = entry[:LATENT], struct.unpack_from("<4f", entry, LATENT)
        latent = [
            (-1.0 if code & 0x80 else 1.0) * (table[code & 0x7F] * scales[j // 128] or 0.0)
            for j, code in enumerate(codes)
        ]
        got = truth[0][row].tolist()
        for mine, its in zip(latent, got[:LATENT], strict=True):
            assert its == mine if mine else its == (-1e-300 if str(mine) == "-0.0" else 0.0), f"row {row}"
        for bits, its in zip(struct.unpack_from(f"<{ROTARY}H", entry, LATENT + 16), got[LATENT:], strict=True):
            number = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
            if number != number:
                assert abs(its) > 1e40
            else:
                assert its == (-1e-300 if bits == 0x8000 else number), f"row {row}"


Latent = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _variant(latent: Latent, rotary_at: int = LATENT + 4 * GROUPS) -> Callable[..., torch.Tensor]:
    """The operation with ``latent`` of codes [L, 512] (fp8) and scales [L, 4], and the copied bytes from elsewhere."""

    def function(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        rows = paged_rows(cache, block_table, seq_lens)
        codes = rows[:, :LATENT].contiguous().view(torch.float8_e4m3fn)
        scales = rows[:, LATENT : LATENT + 4 * GROUPS].contiguous().view(torch.float32)
        rotary = rows[:, rotary_at : rotary_at + 2 * ROTARY].contiguous().view(torch.bfloat16)
        return torch.cat((latent(codes, scales).bfloat16(), rotary), dim=1)

    return function


def _by_group(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = codes.to(torch.float16).unflatten(1, (GROUPS, -1)).float()
    return (groups * scales.unsqueeze(2)).flatten(1)


def _unsigned_zeros(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A scale of 0 gives +0."""
    return torch.where(scales.unsqueeze(2) == 0, 0.0, _by_group(codes, scales).unflatten(1, (GROUPS, -1))).flatten(1)


def _page_by_page(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Request by request; the copied numbers as 16-bit integers."""
    runs = []
    for table, length in zip(block_table, seq_lens.tolist(), strict=True):
        rows = cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
        codes = rows[:, :LATENT].contiguous().view(torch.float8_e4m3fn)
        scales = rows[:, LATENT : LATENT + 4 * GROUPS].contiguous().view(torch.float32)
        latent = _by_group(codes, scales).bfloat16().view(torch.int16)
        runs.append(torch.cat((latent, rows[:, LATENT + 4 * GROUPS :].contiguous().view(torch.int16)), dim=1))
    return torch.cat(runs).view(torch.bfloat16)


def _through_floats(*inputs: Any) -> torch.Tensor:
    """Denormal numbers among the copied ones become zero."""
    out = reference(*inputs)
    tiny = out[:, LATENT:].abs() < torch.finfo(torch.bfloat16).tiny
    out[:, LATENT:] = torch.where(tiny, 0.0, out[:, LATENT:])
    return out


def _whole_pages(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Requests begin where whole pages of the earlier ones end; rows past the end are cut."""
    size = cache.shape[1]
    return reference(cache, block_table, (seq_lens + size - 1) // size * size)[: int(seq_lens.sum())].contiguous()


WRONG: dict[str, Callable[..., torch.Tensor]] = {
    "groups of 64 codes": _variant(
        lambda codes, scales: codes.float() * scales.repeat_interleave(64, dim=1).repeat(1, 2)
    ),
    "scales interleaved over the codes": _variant(lambda codes, scales: codes.float() * scales.repeat(1, 128)),
    "scales rounded to bfloat16": _variant(lambda codes, scales: _by_group(codes, scales.bfloat16().float())),
    "division by the scale": _variant(lambda codes, scales: _by_group(codes, 1 / scales)),
    "a scale of 0 gives +0": _variant(_unsigned_zeros),
    "copied bytes from where the scales are": _variant(_by_group, rotary_at=LATENT),
    "copied denormals flushed": _through_floats,
    "page padding kept between requests": _whole_pages,
}
SECOND = {
    "codes through float16, group by group": _variant(_by_group),
    "page by page, copied as integers": _page_by_page,
}
