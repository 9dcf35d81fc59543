"""RMSNorm over rows of 128 in CuTe DSL: half a warp per row, several independent rows per thread, one pass."""

# mkb-baseline-canary 8f0d1b52-7c1d-4d53-a4a1-0f0b5a1d9e77

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int64
from cutlass.cute.runtime import from_dlpack

HEAD_DIM = 128
EPS = 1e-6
VECTOR = 8  # elements of one 16-byte access
LANES = HEAD_DIM // VECTOR  # threads that share a row
THREADS = 256
ROWS_AT_ONCE = THREADS // LANES
UNROLL = 4  # rows per thread, to have several loads in flight
ROWS_PER_BLOCK = ROWS_AT_ONCE * UNROLL


@cute.kernel
def rmsnorm_kernel(hidden: cute.Tensor, weight: cute.Tensor, y: cute.Tensor) -> None:
    """Normalise rows ROWS_PER_BLOCK * block_idx.x and following; each group of LANES threads takes UNROLL of them."""
    thread, rows = cute.arch.thread_idx()[0], cute.size(hidden, mode=[0])
    group, lane = thread // LANES, thread % LANES
    first_row = cute.arch.block_idx()[0] * ROWS_PER_BLOCK + group

    w = cute.flat_divide(weight, (VECTOR,))[None, lane].load().to(Float32)
    x = cute.make_rmem_tensor((VECTOR, UNROLL), Float32)
    x.fill(0.0)
    for i in cutlass.range_constexpr(UNROLL):
        row = first_row + i * ROWS_AT_ONCE
        if row < rows:
            source = cute.flat_divide(hidden[Int64(row), None], (VECTOR,))
            x[None, i].store(source[None, lane].load().to(Float32))

    for i in cutlass.range_constexpr(UNROLL):
        row = first_row + i * ROWS_AT_ONCE
        total = Float32(0.0)
        for j in cutlass.range_constexpr(VECTOR):
            total += x[j, i] * x[j, i]
        total = cute.arch.warp_reduction_sum(total, threads_in_group=LANES)
        r = cute.math.rsqrt(total / HEAD_DIM + EPS)
        if row < rows:
            target = cute.flat_divide(y[Int64(row), None], (VECTOR,))
            target[None, lane].store((x[None, i].load() * r * w).to(BFloat16))


@cute.jit
def launch(hidden: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
    """Enough blocks for all rows."""
    blocks = cute.ceil_div(cute.size(hidden, mode=[0]), ROWS_PER_BLOCK)
    rmsnorm_kernel(hidden, weight, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


_compiled: list[Any] = []


def solve(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden_states`` [R, 128], ``weight`` [128], both bf16 -> ``y`` [R, 128] bf16."""
    y = torch.empty_like(hidden_states)
    hidden, out = (from_dlpack(t, assumed_align=16).mark_compact_shape_dynamic(0) for t in (hidden_states, y))
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = (hidden, from_dlpack(weight, assumed_align=16), out, stream)
    if not _compiled:
        _compiled.append(cute.compile(launch, *arguments))
    _compiled[0](*arguments)
    return y
