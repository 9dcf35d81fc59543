"""Random and geometric inputs as most problems need them. Everything follows the generator, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch


def normal(
    generator: torch.Generator,
    *sizes: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    mean: float = 0.0,
) -> torch.Tensor:
    """``mean + scale N(0, 1)``, drawn and scaled in float32, then rounded to ``dtype``."""
    drawn = torch.randn(sizes, generator=generator, device=generator.device)
    if scale != 1.0:
        drawn *= scale
    if mean:
        drawn += mean
    return drawn.to(dtype)


def uniform(
    generator: torch.Generator, *sizes: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Uniform in [low, high), drawn in float32, then rounded to ``dtype``."""
    drawn = torch.rand(sizes, generator=generator, device=generator.device)
    return drawn.mul_(high - low).add_(low).to(dtype)


def integers(
    generator: torch.Generator, *sizes: int, high: int, low: int = 0, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Uniform integers in [low, high)."""
    return torch.randint(low, high, sizes, generator=generator, device=generator.device, dtype=dtype)


def permutation(generator: torch.Generator, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The numbers from 0 to ``count`` - 1 in random order."""
    return torch.randperm(count, generator=generator, device=generator.device).to(dtype)


def offsets(lengths: Sequence[int]) -> list[int]:
    """0 and the running sums: where each of several runs of these lengths begins, and where the last ends."""
    return [0, *accumulate(lengths)]


def redraw(
    draw: Callable[[int], torch.Tensor], good: Callable[[torch.Tensor], torch.Tensor], rows: int
) -> torch.Tensor:
    """``rows`` rows, each drawn again until ``good`` holds for it.

    Args:
        draw: gives that many new rows, [n, ...].
        good: of [n, ...], a bool [n].
        rows: how many to return.

    Raises:
        RuntimeError: if some rows are still not good after 64 rounds.
    """
    result = draw(rows)
    places = torch.arange(rows, device=result.device)
    fresh = result
    for _ in range(64):
        places = places[~good(fresh)]
        if not len(places):
            return result
        fresh = draw(len(places))
        result[places] = fresh
    raise RuntimeError(f"{len(places)} of {rows} rows found no acceptable draw in 64 rounds")
