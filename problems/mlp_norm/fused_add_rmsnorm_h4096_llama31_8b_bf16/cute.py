"""Residual add + RMSNorm in CuTe DSL: one block per row, the row stays in registers between the two passes."""

# mkb-baseline-canary 3b0c9f0e-6a51-4a0b-9c39-2d6a0f4f2f0e

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int64
from cutlass.cute.runtime import from_dlpack

HIDDEN = 4096
EPS = 1e-5
VECTOR = 8  # elements of one 16-byte access
THREADS = 256
WARPS = THREADS // 32
VECTORS = HIDDEN // (VECTOR * THREADS)  # per thread


@cute.kernel
def rmsnorm_kernel(hidden: cute.Tensor, residual: cute.Tensor, weight: cute.Tensor, y: cute.Tensor) -> None:
    """Normalise row ``block_idx.x``; thread t holds the vectors t, t + THREADS, ... of the row."""
    row, thread = Int64(cute.arch.block_idx()[0]), cute.arch.thread_idx()[0]
    partial_sums = cutlass.utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)

    hidden_row, residual_row, y_row = (cute.flat_divide(t[row, None], (VECTOR,)) for t in (hidden, residual, y))
    weight_row = cute.flat_divide(weight, (VECTOR,))
    s = cute.make_rmem_tensor((VECTOR, VECTORS), Float32)
    w = cute.make_rmem_tensor((VECTOR, VECTORS), Float32)
    for i in cutlass.range_constexpr(VECTORS):
        at = (None, thread + i * THREADS)
        s[None, i].store(hidden_row[at].load().to(Float32) + residual_row[at].load().to(Float32))
        w[None, i].store(weight_row[at].load().to(Float32))

    total = Float32(0.0)
    for i in cutlass.range_constexpr(VECTORS * VECTOR):
        total += s[i] * s[i]
    total = cute.arch.warp_reduction_sum(total)
    if thread % 32 == 0:
        partial_sums[thread // 32] = total
    cute.arch.sync_threads()
    total = Float32(0.0)
    for i in cutlass.range_constexpr(WARPS):
        total += partial_sums[i]

    r = cute.math.rsqrt(total / HIDDEN + EPS)
    for i in cutlass.range_constexpr(VECTORS):
        y_row[None, thread + i * THREADS].store((s[None, i].load() * r * w[None, i].load()).to(BFloat16))


@cute.jit
def launch(
    hidden: cute.Tensor, residual: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream
) -> None:
    """One block per row."""
    rows = cute.size(hidden, mode=[0])
    rmsnorm_kernel(hidden, residual, weight, y).launch(grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream)


_compiled: list[Any] = []


def solve(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden_states`` and ``residual`` [T, 4096], ``weight`` [4096], all bf16 -> ``y`` [T, 4096] bf16."""
    y = torch.empty_like(hidden_states)
    rows = [from_dlpack(t, assumed_align=16).mark_compact_shape_dynamic(0) for t in (hidden_states, residual, y)]
    arguments = (rows[0], rows[1], from_dlpack(weight, assumed_align=16), rows[2])
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    if not _compiled:
        _compiled.append(cute.compile(launch, *arguments, stream))
    _compiled[0](*arguments, stream)
    return y
