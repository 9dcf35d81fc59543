"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.kv_cache.common import finite_e4m3_values, paged_rows, sample

from .problem import reference

INDEPENDENT = "table of all 256 codes by the format's definition, exact float64 products rounded once; token by token"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Up to 400 rows; zeros with their sign."""
    cache, block_table, seq_lens, scale = inputs
    values = finite_e4m3_values(cache.device)
    values = torch.cat((values, values.new_full((1,), torch.nan)))
    values = torch.cat((values, -values))
    products = (values * float(torch.tensor(scale, dtype=torch.float32))).float().double()
    products[0x80] = -1e-300  # how the truth writes -0
    tables = block_table.tolist()
    owners = [(r, p) for r, length in enumerate(seq_lens.tolist()) for p in range(length)]
    assert truth[0].shape == (len(owners), cache.shape[2])
    for row in sample(len(owners), 400):
        request, place = owners[row]
        codes = cache[tables[request][place // cache.shape[1]], place % cache.shape[1]]
        got, want = truth[0][row], products[codes.long()]
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def _scaled(multiply: Callable[[torch.Tensor, float], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The operation with ``multiply`` of fp8 values and scale."""

    def function(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
        return multiply(paged_rows(cache, block_table, seq_lens).view(torch.float8_e4m3fn), scale)

    return function


def _by_table(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
    """Products of all codes first, then request by request, page by page."""
    codes = torch.arange(256, dtype=torch.uint8, device=cache.device).view(torch.float8_e4m3fn)
    products = codes.float() * torch.tensor(scale, dtype=torch.float32, device=cache.device)
    runs = []
    for table, length in zip(block_table, seq_lens.tolist(), strict=True):
        pages = table[: -(-length // cache.shape[1])].long()
        runs.append(products[cache[pages].flatten(0, 1)[:length].long()])
    return torch.cat(runs)


def _whole_pages(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
    """Requests begin where whole pages of the earlier ones end; rows past the end are cut."""
    size, count = cache.shape[1], int(seq_lens.sum())
    padded = (seq_lens + size - 1) // size * size
    return reference(cache, block_table, padded, scale)[:count].contiguous()


def _unsigned_zeros(*inputs: Any) -> torch.Tensor:
    out = reference(*inputs)
    return torch.where(out == 0, 0.0, out)


def _divided(values: torch.Tensor, scale: float) -> torch.Tensor:
    # A tensor divisor: CUDA multiplies by the reciprocal of a Python one, which is the scale again.
    return values.float() / torch.full((), 1 / scale, device=values.device)


def _nan_as_480(values: torch.Tensor, scale: float) -> torch.Tensor:
    """The NaN codes as the numbers that their bits would be in a format without NaN."""
    wide = values.float()
    signs = torch.where(values.view(torch.uint8) >= 0x80, -480.0, 480.0)
    return torch.where(wide.isnan(), signs, wide) * scale


WRONG = {
    "product in float64 with the unrounded scale": _scaled(lambda values, scale: (values.double() * scale).float()),
    "product rounded to bfloat16": _scaled(lambda values, scale: (values.float() * scale).bfloat16().float()),
    "division by the reciprocal of the scale": _scaled(_divided),
    "zeros without their sign": _unsigned_zeros,
    "NaN codes as 480": _scaled(_nan_as_480),
    "page padding kept between requests": _whole_pages,
    "request 0's table for all": lambda cache, table, lens, scale: reference(
        cache, table[:1].expand_as(table), lens, scale
    ),
    "page after page, ignoring the table": lambda cache, table, lens, scale: reference(
        cache, (torch.arange(table.shape[1], device=table.device) % len(cache)).expand_as(table), lens, scale
    ),
}
SECOND = {
    "a table of 256 products, page by page": _by_table,
    "fp8 widened through float16": _scaled(lambda values, scale: values.to(torch.float16).float() * scale),
}
