"""Gather the cached tokens of several requests from a paged fp8 cache of latents, dequantise them with one scale and
pack them into one buffer (DeepSeek-V3, chunked prefill).

There are B requests, L tokens in all, E = 576 numbers per token, NB cache pages, BS slots per page and tables of W
pages. Codes are bytes of the format e4m3 with finite values only (float8_e4m3fn: no infinity, NaN at 0x7F and 0xFF).

Inputs, contiguous and row-major:
  src_cache    [NB, BS, E]  uint8  codes
  block_table  [B, W]       int32  pages in [0, NB), for each request in the order of its tokens
  seq_lens     [B]          int32  tokens of each request, zero or more; they sum to L
  scale        float

Output, contiguous and row-major:
  out          [L, E]       float32

The rows of out are those of request 0, then of request 1, and so on. For request r and 0 <= p < seq_lens[r], with
page = block_table[r, p // BS] and e4m3(c) the number that code c stands for:
  out[seq_lens[0] + ... + seq_lens[r - 1] + p] = e4m3(src_cache[page, p % BS]) * float32(scale)

Numerics: scale is rounded to float32 first; each number is one float32 product, rounded to nearest even, and is
compared bit for bit, the sign of a zero included. A NaN code gives NaN (any NaN).

Rules:
- A request with no tokens has no rows.
- Lengths are not multiples of BS. Table entries past a request's last page are valid pages that it does not use.
- Requests may share pages. No request has a page twice.
- seq_lens is fixed by the workload and its values are visible to host code; block_table is not.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.kv_cache import common

TITLE = "Gather and dequantise rows of a paged fp8 latent cache"
NUMBER = 23
MODEL = "DeepSeek-V3"
INPUTS = ("src_cache", "block_table", "seq_lens", "scale")
OUTPUTS = ("out",)
HOST_VISIBLE = ("seq_lens",)
ENTRY = 576
WORKLOADS = {
    "full": {
        "seq_lens": [0, 1] + [517 + 115 * (7 * k % 30) for k in range(30)],
        "BS": 16, "NB": 8192, "W": 4096, "scale": 0.1, "odd_codes": 1000,
    },
    "small": {"seq_lens": [13, 0, 8], "BS": 4, "NB": 8, "W": 8, "scale": 0.1, "odd_codes": 60},
    "heldout": [
        {"seq_lens": [1 + 146 * (3 * k % 8) for k in range(8)], "BS": 16, "NB": 1024, "W": 1024, "scale": 0.1},
        {"seq_lens": [0, 1, 63, 64, 65, 0, 1000], "BS": 64, "NB": 37, "W": 37, "scale": 0.0371},
    ],
}  # fmt: skip


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Each request's tokens."""
    return {"seq_lens": shape["seq_lens"]}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    requests = len(shape["seq_lens"])
    return (
        ((shape["NB"], shape["BS"], ENTRY), torch.uint8),
        ((requests, shape["W"]), torch.int32),
        ((requests,), torch.int32),
        shape["scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((sum(shape["seq_lens"]), ENTRY), torch.float32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Codes of N(0, 1) / scale, a random order of pages per request, in ``INPUTS``' order.

    ``odd_codes`` random codes are NaN or zero, of either sign.
    """
    pages, size, scale = shape["NB"], shape["BS"], shape["scale"]
    values = normal(generator, pages, size, ENTRY, dtype=torch.float16) / scale
    codes = values.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if count := shape.get("odd_codes", 0):
        page = permutation(generator, pages, torch.int64).repeat(-(-count // pages))[:count]
        column = permutation(generator, size * ENTRY, torch.int64)[:count]
        odd = torch.tensor([0x7F, 0xFF, 0x00, 0x80], dtype=torch.uint8, device=generator.device)
        codes.view(pages, -1)[page, column] = odd[torch.arange(count, device=generator.device) % 4]
    requests = len(shape["seq_lens"])
    order = torch.rand(requests, pages, generator=generator, device=generator.device).argsort(dim=1)
    table = order[:, : shape["W"]].to(torch.int32).contiguous()
    return codes, table, torch.tensor(shape["seq_lens"], dtype=torch.int32, device=generator.device), scale


def reference(src_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
    """The module's formula."""
    rows = common.paged_rows(src_cache, block_table, seq_lens)
    return rows.view(torch.float8_e4m3fn).float() * torch.tensor(scale, dtype=torch.float32, device=rows.device)


def anchor(*inputs: Any) -> torch.Tensor:
    """The reference's own numbers: the definition says which float32 each is."""
    return common.with_signed_zeros(reference(*inputs))


def decode(name: str, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sign of a zero counts."""
    return common.with_signed_zeros(outputs[name])


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """None: every number is exact."""
    return torch.zeros((), device=anchor.device).expand(anchor.shape)


def COST(shape: Shape) -> Cost:
    """Each row read as codes (but no more than the cache) and written in float32; used table entries and lengths."""
    lengths = shape["seq_lens"]
    tokens = sum(lengths)
    read = min(tokens, shape["NB"] * shape["BS"]) * ENTRY
    pages = sum(-(-length // shape["BS"]) for length in lengths)
    return Cost(bytes=read + 4 * tokens * ENTRY + 4 * pages + 4 * len(lengths), flops=tokens * ENTRY, unit="fp32")
