"""Residual add + RMSNorm in TIRx: one block per row, the row stays in registers between the two passes."""

# mkb-baseline-canary 5b7c7a6e-2a44-4c0e-8f5d-c1de0b1f6a19

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import tvm
from tvm.script import tirx as T

HIDDEN = 4096
EPS = 1e-5
VECTOR = 8  # elements of one 16-byte access
THREADS = 256
WARPS = THREADS // 32
VECTORS = HIDDEN // (VECTOR * THREADS)  # per thread


@T.prim_func
def rmsnorm(hidden_ptr: T.handle, residual_ptr: T.handle, weight_ptr: T.handle, y_ptr: T.handle):
    """Block b normalises row b; thread t holds the vectors t, t + THREADS, ... of the row."""
    rows = T.int64()
    hidden = T.match_buffer(hidden_ptr, (rows, HIDDEN), "bfloat16")
    residual = T.match_buffer(residual_ptr, (rows, HIDDEN), "bfloat16")
    weight = T.match_buffer(weight_ptr, (HIDDEN,), "bfloat16")
    y = T.match_buffer(y_ptr, (rows, HIDDEN), "bfloat16")
    T.device_entry()
    row: T.let = T.Cast("int64", T.cta_id([T.Cast("int32", rows)]))
    thread = T.thread_id([THREADS])
    partial_sums = T.alloc_shared((WARPS,), "float32")
    a = T.alloc_local((VECTOR,), "bfloat16")
    b = T.alloc_local((VECTOR,), "bfloat16")
    w = T.alloc_local((VECTORS, VECTOR), "bfloat16")
    s = T.alloc_local((VECTORS, VECTOR), "float32")
    total = T.alloc_local((1,), "float32")

    total[0] = T.float32(0)
    for i in T.unroll(VECTORS):
        for j in T.vectorized(VECTOR):
            a[j] = hidden[row, (i * THREADS + thread) * VECTOR + j]
        for j in T.vectorized(VECTOR):
            b[j] = residual[row, (i * THREADS + thread) * VECTOR + j]
        for j in T.vectorized(VECTOR):
            w[i, j] = weight[(i * THREADS + thread) * VECTOR + j]
        for j in T.unroll(VECTOR):
            s[i, j] = T.Cast("float32", a[j]) + T.Cast("float32", b[j])
            total[0] += s[i, j] * s[i, j]

    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        partial_sums[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for i in T.unroll(WARPS):
        total[0] += partial_sums[i]

    total[0] = T.rsqrt(total[0] / T.float32(HIDDEN) + T.float32(EPS))
    for i in T.unroll(VECTORS):
        for j in T.unroll(VECTOR):
            a[j] = T.Cast("bfloat16", s[i, j] * total[0] * T.Cast("float32", w[i, j]))
        for j in T.vectorized(VECTOR):
            y[row, (i * THREADS + thread) * VECTOR + j] = a[j]


@cache
def compiled() -> Any:
    """The kernel for any number of rows."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    return tvm.compile(tvm.IRModule({"main": rmsnorm}), target=target, tir_pipeline="tirx")


def solve(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden_states`` and ``residual`` [T, 4096], ``weight`` [4096], all bf16 -> ``y`` [T, 4096] bf16."""
    y = torch.empty_like(hidden_states)
    compiled()(hidden_states, residual, weight, y)
    return y
