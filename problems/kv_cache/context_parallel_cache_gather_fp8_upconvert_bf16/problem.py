"""Gather the cached tokens of several requests from a paged cache that mixes fp8 latents, their scales and bfloat16
rotary parts, and widen them into one bfloat16 buffer (DeepSeek-V3.2, sparse attention on one rank).

There are B requests, L tokens in all, NB cache pages, BS slots per page and tables of W pages. A slot is an entry of
656 bytes, 16-byte aligned, little-endian:
  bytes 0 to 511     512 codes of the format e4m3 with finite values only (float8_e4m3fn), none of them NaN
  bytes 512 to 527   4 scales, float32; scale g belongs to codes 128 g to 128 g + 127
  bytes 528 to 655   64 bfloat16 numbers

Inputs, contiguous and row-major:
  cache        [NB, BS, 656]  uint8
  block_table  [B, W]         int32  pages in [0, NB), for each request in the order of its tokens; unused entries are 0
  seq_lens     [B]            int32  tokens of each request, zero or more; they sum to L

Output, contiguous and row-major:
  out          [L, 576]       bfloat16

The rows of out are those of request 0, then of request 1, and so on. For request r and 0 <= p < seq_lens[r], with the
entry cache[block_table[r, p // BS], p % BS] and row = seq_lens[0] + ... + seq_lens[r - 1] + p:
  out[row, j] = bfloat16(float32(code_j) * scale_{j // 128})     for j < 512
  out[row, 512:] = the 64 bfloat16 numbers

Numerics: each product is a float32 product, rounded once more to bfloat16, to nearest even. A zero has the sign of its
code, for a scale of 0 too (scales are never negative). The 64 numbers are copied bit for bit and may be anything, NaN,
infinities and -0 included.

Rules:
- A request with no tokens has no rows. Lengths are not multiples of BS.
- No two requests share a page.
- seq_lens is fixed by the workload and its values are visible to host code; block_table is not.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal, permutation, uniform
from mkb_env.problems.kv_cache import common

TITLE = "Gather a mixed fp8 and bfloat16 latent cache into a bfloat16 buffer"
NUMBER = 24
MODEL = "DeepSeek-V3.2"
INPUTS = ("cache", "block_table", "seq_lens")
OUTPUTS = ("out",)
HOST_VISIBLE = ("seq_lens",)
LATENT, GROUPS, ROTARY = 512, 4, 64
ENTRY = LATENT + 4 * GROUPS + 2 * ROTARY
ODD = {"odd_entries": True}
WORKLOADS = {
    "full": {"seq_lens": [0, 2] + [2731 + 300 * (5 * k % 14) for k in range(14)], "BS": 64, "NB": 1100, **ODD},
    "small": {"seq_lens": [5, 0, 4], "BS": 4, "NB": 4, **ODD},
    "heldout": [
        {"seq_lens": [129, 1, 511], "BS": 64, "NB": 16},
        {"seq_lens": [0, 64, 1, 191, 0, 777], "BS": 64, "NB": 24, **ODD},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Each request's tokens."""
    return {"seq_lens": shape["seq_lens"]}


def _pages(shape: Shape) -> list[int]:
    """Each request's pages."""
    return [-(-length // shape["BS"]) for length in shape["seq_lens"]]


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    pages = _pages(shape)
    return (
        ((shape["NB"], shape["BS"], ENTRY), torch.uint8),
        ((len(pages), max(pages)), torch.int32),
        ((len(pages),), torch.int32),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((sum(shape["seq_lens"]), LATENT + ROTARY), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Codes and numbers of N(0, 1), scales in [0.1, 2.1), pages in random order, in ``INPUTS``' order.

    With ``odd_entries``, an eighth of the scales are 0, another eighth 3e4, and in half of the entries the 64 numbers
    are zeros and denormals or infinities and NaN, of arbitrary sign and mantissa.
    """
    slots, device = shape["NB"] * shape["BS"], generator.device
    codes = normal(generator, slots, LATENT).to(torch.float8_e4m3fn)
    scales = uniform(generator, slots, GROUPS, low=0.1, high=2.1)
    rotary = normal(generator, slots, ROTARY, dtype=torch.bfloat16)
    if shape.get("odd_entries"):
        eighth = integers(generator, slots, GROUPS, high=8)
        scales.masked_fill_(eighth == 0, 0.0).masked_fill_(eighth == 1, 3e4)
        bits = integers(generator, slots, ROTARY, low=-(2**15), high=2**15, dtype=torch.int16)
        bits = torch.where(integers(generator, slots, ROTARY, high=2) == 0, bits & -0x7F81, bits | 0x7F80)
        odd = integers(generator, slots, 1, high=2) == 0
        rotary = torch.where(odd, bits, rotary.view(torch.int16)).view(torch.bfloat16)
    cache = torch.cat([part.view(torch.uint8) for part in (codes, scales, rotary)], dim=1)
    pages = torch.tensor(_pages(shape), device=device)
    (_, _), (table_sizes, _), _ = input_specs(shape)
    table = torch.zeros(table_sizes, dtype=torch.int32, device=device)
    used = torch.arange(table_sizes[1], device=device) < pages.unsqueeze(1)
    table.masked_scatter_(used, permutation(generator, shape["NB"]))
    lengths = torch.tensor(shape["seq_lens"], dtype=torch.int32, device=device)
    return cache.view(shape["NB"], shape["BS"], ENTRY), table, lengths


def reference(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """The module's formula."""
    codes, scales, rotary = _parts(common.paged_rows(cache, block_table, seq_lens))
    latent = codes.float() * scales.repeat_interleave(LATENT // GROUPS, dim=1)
    return torch.cat((latent.bfloat16(), rotary), dim=1)


def _parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and numbers of entries [n, 656] in their types."""
    parts = rows.split((LATENT, 4 * GROUPS, 2 * ROTARY), dim=1)
    codes, scales, rotary = (part.contiguous() for part in parts)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float32), rotary.view(torch.bfloat16)


def anchor(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Products in float64, and numbers that stand for the bits of what is copied."""
    codes, scales, rotary = _parts(common.paged_rows(cache, block_table, seq_lens))
    latent = codes.double() * scales.double().repeat_interleave(LATENT // GROUPS, dim=1)
    return torch.cat((common.with_signed_zeros(latent), common.bitwise(rotary)), dim=1)


def decode(name: str, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sign of a zero counts, and the bits of what is copied."""
    latent, rotary = outputs[name].split((LATENT, ROTARY), dim=1)
    return torch.cat((common.with_signed_zeros(latent), common.bitwise(rotary)), dim=1)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Half a unit of bfloat16 (2^-8) for products, with room for the float32 rounding before; nothing for copies."""
    bound = 2.0**-8 * (1 + 2.0**-12) * anchor.abs()
    bound[:, LATENT:] = 0.0
    return bound


def COST(shape: Shape) -> Cost:
    """Each entry read and each row written once, used table entries and lengths; a product per code."""
    tokens, pages = sum(shape["seq_lens"]), _pages(shape)
    moved = tokens * (ENTRY + 2 * (LATENT + ROTARY)) + 4 * sum(pages) + 4 * len(pages)
    return Cost(bytes=moved, flops=tokens * LATENT, unit="fp32")
