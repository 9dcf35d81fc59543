"""RMSNorm over rows of 128 in TIRx: half a warp per row, several independent rows per thread, one pass."""

# mkb-baseline-canary e1a6b5f4-0f0e-4b9f-9d3c-7f6f7b0c2d58

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import tvm
from tvm.script import tirx as T

HEAD_DIM = 128
EPS = 1e-6
VECTOR = 8  # elements of one 16-byte access
LANES = HEAD_DIM // VECTOR  # threads that share a row
THREADS = 256
ROWS_AT_ONCE = THREADS // LANES
UNROLL = 4  # rows per thread, to have several loads in flight
ROWS_PER_BLOCK = ROWS_AT_ONCE * UNROLL


@T.prim_func
def rmsnorm(hidden_ptr: T.handle, weight_ptr: T.handle, y_ptr: T.handle):
    """Block b normalises ROWS_PER_BLOCK rows; each group of LANES threads takes UNROLL of them."""
    rows = T.int64()
    hidden = T.match_buffer(hidden_ptr, (rows, HEAD_DIM), "bfloat16")
    weight = T.match_buffer(weight_ptr, (HEAD_DIM,), "bfloat16")
    y = T.match_buffer(y_ptr, (rows, HEAD_DIM), "bfloat16")
    T.device_entry()
    block = T.cta_id([T.Cast("int32", T.ceildiv(rows, ROWS_PER_BLOCK))])
    thread = T.thread_id([THREADS])
    lane: T.let = thread % LANES
    first_row: T.let = T.Cast("int64", block) * ROWS_PER_BLOCK + T.Cast("int64", thread // LANES)
    x = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    w = T.alloc_local((VECTOR,), "bfloat16")
    out = T.alloc_local((VECTOR,), "bfloat16")
    total = T.alloc_local((1,), "float32")

    for j in T.vectorized(VECTOR):
        w[j] = weight[lane * VECTOR + j]
    for i in T.unroll(UNROLL):
        if first_row + i * ROWS_AT_ONCE < rows:
            for j in T.vectorized(VECTOR):
                x[i, j] = hidden[first_row + i * ROWS_AT_ONCE, lane * VECTOR + j]
        else:
            for j in T.vectorized(VECTOR):
                x[i, j] = T.bfloat16(0)

    for i in T.unroll(UNROLL):
        total[0] = T.float32(0)
        for j in T.unroll(VECTOR):
            total[0] += T.Cast("float32", x[i, j]) * T.Cast("float32", x[i, j])
        total[0] = T.cuda.warp_sum(total[0], LANES)
        total[0] = T.rsqrt(total[0] / T.float32(HEAD_DIM) + T.float32(EPS))
        for j in T.unroll(VECTOR):
            out[j] = T.Cast("bfloat16", T.Cast("float32", x[i, j]) * total[0] * T.Cast("float32", w[j]))
        if first_row + i * ROWS_AT_ONCE < rows:
            for j in T.vectorized(VECTOR):
                y[first_row + i * ROWS_AT_ONCE, lane * VECTOR + j] = out[j]


@cache
def compiled() -> Any:
    """The kernel for any number of rows."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    return tvm.compile(tvm.IRModule({"main": rmsnorm}), target=target, tir_pipeline="tirx")


def solve(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden_states`` [R, 128], ``weight`` [128], both bf16 -> ``y`` [R, 128] bf16."""
    y = torch.empty_like(hidden_states)
    compiled()(hidden_states, weight, y)
    return y
