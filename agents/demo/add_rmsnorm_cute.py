"""Residual add + RMSNorm of width 4096 in CuTe DSL, for reading rather than speed: one block per row, scalar loads."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

EPS = 1e-5
THREADS = 256
WARPS = THREADS // 32


@cute.kernel
def rmsnorm_kernel(x: cute.Tensor, residual: cute.Tensor, weight: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    width = cute.size(weight)
    squares = cutlass.Float32(0.0)
    for column in range(thread, width, THREADS):
        value = x[row, column].to(cutlass.Float32) + residual[row, column].to(cutlass.Float32)
        squares += value * value

    # Sum over the warp by shuffles, then over the warps through shared memory.
    for step in cutlass.range_constexpr(5):
        squares += cute.arch.shuffle_sync_bfly(squares, offset=1 << step)
    warp_sums = cutlass.utils.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout(WARPS), byte_alignment=16
    )
    if thread % 32 == 0:
        warp_sums[thread // 32] = squares
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for warp in cutlass.range_constexpr(WARPS):
        total += warp_sums[warp]

    scale = cute.math.rsqrt(total / width + EPS)
    for column in range(thread, width, THREADS):
        value = x[row, column].to(cutlass.Float32) + residual[row, column].to(cutlass.Float32)
        y[row, column] = (value * scale * weight[column].to(cutlass.Float32)).to(cutlass.BFloat16)


@cute.jit
def launch(x: cute.Tensor, residual: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    rmsnorm_kernel(x, residual, weight, y).launch(
        grid=[cute.size(x, mode=[0]), 1, 1], block=[THREADS, 1, 1], stream=stream
    )


compiled = {}


def solve(hidden_states, residual, weight):
    y = torch.empty_like(hidden_states)
    rows = [from_dlpack(t).mark_layout_dynamic(leading_dim=1) for t in (hidden_states, residual, y)]
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = (rows[0], rows[1], from_dlpack(weight), rows[2], stream)
    if "launch" not in compiled:
        compiled["launch"] = cute.compile(launch, *arguments)
    compiled["launch"](*arguments)
    return y
