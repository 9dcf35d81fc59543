"""Measures what a GPU can do at the most: a copy through memory, and matrix products by operand type."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch

from mkb_env.devices.base import Device
from mkb_env.judge.draws import strict_math
from mkb_env.judge.roofline import Ceilings
from mkb_env.judge.timing import Stopwatch

COPY_BYTES = 4 << 30
SIZE = 8192
"""Of the square matrices."""
REPEATS = 10


def measure(device: Device) -> Ceilings:
    """Ceilings of a CUDA device: medians of ``REPEATS`` runs, each from an idle stream with a cold L2."""
    clock = Stopwatch(device)

    def rate(amount: float, work: Callable[[], object]) -> float:
        work()
        return amount / statistics.median(clock.queued(work) for _ in range(REPEATS))

    moved = rate(2 * COPY_BYTES, _copy(device.torch_device))
    flops = {unit: rate(2 * SIZE**3, work) for unit, work in _products(device.torch_device)}
    return Ceilings(device.name, moved, {**flops, "3xtf32": flops["tf32"] / 3})


def _copy(device: torch.device) -> Callable[[], object]:
    source, target = (torch.ones(COPY_BYTES // 8, dtype=torch.int64, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _products(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Square products by ``Cost.unit``, on normal numbers: zeros would draw less power and clock higher."""
    a, b = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))
    with strict_math():
        yield "fp32", lambda: a @ b
        torch.backends.cuda.matmul.allow_tf32 = True
        yield "tf32", lambda: a @ b
    left, right = a.bfloat16(), b.bfloat16()
    yield "bf16", lambda: left @ right
    one = torch.ones((), device=device)
    narrow, other = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    yield "fp8", lambda: torch._scaled_mm(narrow, other, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
