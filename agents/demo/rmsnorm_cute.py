"""RMSNorm over rows of 128 in CuTe DSL, for reading rather than speed: one warp per row, scalar loads."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

EPS = 1e-6
WIDTH = 128
LANES = 32


@cute.kernel
def rmsnorm_kernel(x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    squares = cutlass.Float32(0.0)
    for i in cutlass.range_constexpr(WIDTH // LANES):
        value = x[row, lane + i * LANES].to(cutlass.Float32)
        squares += value * value
    for step in cutlass.range_constexpr(5):
        squares += cute.arch.shuffle_sync_bfly(squares, offset=1 << step)
    scale = cute.math.rsqrt(squares / WIDTH + EPS)
    for i in cutlass.range_constexpr(WIDTH // LANES):
        column = lane + i * LANES
        value = x[row, column].to(cutlass.Float32) * scale * weight[column].to(cutlass.Float32)
        y[row, column] = value.to(cutlass.BFloat16)


@cute.jit
def launch(x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    rmsnorm_kernel(x, weight, y).launch(grid=[cute.size(x, mode=[0]), 1, 1], block=[LANES, 1, 1], stream=stream)


compiled = {}


def solve(hidden_states, weight):
    y = torch.empty_like(hidden_states)
    x, out = (from_dlpack(t).mark_layout_dynamic(leading_dim=1) for t in (hidden_states, y))
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = (x, from_dlpack(weight), out, stream)
    if "launch" not in compiled:
        compiled["launch"] = cute.compile(launch, *arguments)
    compiled["launch"](*arguments)
    return y
