"""RMSNorm over rows of 128 in TIRx, for reading rather than speed: one block of 128 threads per row."""

import torch
import tvm
from tvm.script import tirx as T

EPS = 1e-6
WIDTH = 128


@T.prim_func
def rmsnorm(X_ptr: T.handle, W_ptr: T.handle, Y_ptr: T.handle):
    rows = T.int32()
    X = T.match_buffer(X_ptr, (rows, WIDTH), "bfloat16")
    W = T.match_buffer(W_ptr, (WIDTH,), "bfloat16")
    Y = T.match_buffer(Y_ptr, (rows, WIDTH), "bfloat16")
    T.device_entry()
    row = T.cta_id([rows])
    column = T.thread_id([WIDTH])
    sums = T.alloc_shared((WIDTH,), "float32")
    value = T.alloc_local((1,), "float32")
    active = T.alloc_local((1,), "int32")
    value[0] = T.Cast("float32", X[row, column])

    # Sum over the block: a tree in shared memory.
    sums[column] = value[0] * value[0]
    T.cuda.cta_sync()
    active[0] = WIDTH // 2
    while active[0] >= 1:
        if column < active[0]:
            sums[column] += sums[column + active[0]]
        T.cuda.cta_sync()
        active[0] = active[0] // 2

    value[0] = value[0] * T.rsqrt(sums[0] / T.float32(WIDTH) + T.float32(EPS))
    Y[row, column] = T.Cast("bfloat16", value[0] * T.Cast("float32", W[column]))


compiled = {}


def solve(hidden_states, weight):
    y = torch.empty_like(hidden_states)
    if "rmsnorm" not in compiled:
        target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
        compiled["rmsnorm"] = tvm.compile(tvm.IRModule({"main": rmsnorm}), target=target, tir_pipeline="tirx")
    compiled["rmsnorm"](hidden_states, weight, y)
    return y
