"""Residual add + RMSNorm of width 4096 in TIRx, for reading rather than speed: one block per row, scalar loads."""

import torch
import tvm
from tvm.script import tirx as T

EPS = 1e-5
WIDTH = 4096
THREADS = 256


@T.prim_func
def rmsnorm(X_ptr: T.handle, R_ptr: T.handle, W_ptr: T.handle, Y_ptr: T.handle):
    rows = T.int32()
    X = T.match_buffer(X_ptr, (rows, WIDTH), "bfloat16")
    R = T.match_buffer(R_ptr, (rows, WIDTH), "bfloat16")
    W = T.match_buffer(W_ptr, (WIDTH,), "bfloat16")
    Y = T.match_buffer(Y_ptr, (rows, WIDTH), "bfloat16")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([THREADS])
    sums = T.alloc_shared((THREADS,), "float32")
    value = T.alloc_local((1,), "float32")
    squares = T.alloc_local((1,), "float32")
    active = T.alloc_local((1,), "int32")
    squares[0] = T.float32(0)
    for i in T.serial(WIDTH // THREADS):
        value[0] = T.Cast("float32", X[row, i * THREADS + thread]) + T.Cast("float32", R[row, i * THREADS + thread])
        squares[0] += value[0] * value[0]

    # Sum over the block: a tree in shared memory.
    sums[thread] = squares[0]
    T.cuda.cta_sync()
    active[0] = THREADS // 2
    while active[0] >= 1:
        if thread < active[0]:
            sums[thread] += sums[thread + active[0]]
        T.cuda.cta_sync()
        active[0] = active[0] // 2

    for i in T.serial(WIDTH // THREADS):
        value[0] = T.Cast("float32", X[row, i * THREADS + thread]) + T.Cast("float32", R[row, i * THREADS + thread])
        value[0] = value[0] * T.rsqrt(sums[0] / T.float32(WIDTH) + T.float32(EPS))
        Y[row, i * THREADS + thread] = T.Cast("bfloat16", value[0] * T.Cast("float32", W[i * THREADS + thread]))


compiled = {}


def solve(hidden_states, residual, weight):
    y = torch.empty_like(hidden_states)
    if "rmsnorm" not in compiled:
        target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
        compiled["rmsnorm"] = tvm.compile(tvm.IRModule({"main": rmsnorm}), target=target, tir_pipeline="tirx")
    compiled["rmsnorm"](hidden_states, residual, weight, y)
    return y
