"""Small submissions for y = 2 x over [rows, 128] bfloat16, and a way to record them."""

from __future__ import annotations

from mkb_env.plan import LaunchPlan, decode
from mkb_env.recorder.client import RecorderClient
from mkb_env.recorder.protocol import Call, Failure, Input, Limits, OutputSpec, Recording, RecordRequest, TensorInput

ROWS = 4
INPUTS: tuple[Input, ...] = (TensorInput((ROWS, 128), "bfloat16"),)
OUTPUTS = (OutputSpec((ROWS, 128), "bfloat16"),)

CUTE = """
import torch
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def double(x: cute.Tensor, y: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    column, _, _ = cute.arch.thread_idx()
    y[row, column] = (x[row, column].to(cutlass.Float32) * 2.0).to(cutlass.BFloat16)

@cute.jit
def run(x: cute.Tensor, y: cute.Tensor):
    double(x, y).launch(grid=[cute.size(x, mode=[0]), 1, 1], block=[128, 1, 1])

def launch(x, y):
    a, b = from_dlpack(x), from_dlpack(y)
    cute.compile(run, a, b)(a, b)

def solve(x):
    y = torch.empty_like(x)
    launch(x, y)
    return y
"""

TIRX = """
import torch
import tvm
from tvm.script import tirx as T

def build(rows):
    @T.prim_func
    def double(x_ptr: T.handle, y_ptr: T.handle):
        x = T.match_buffer(x_ptr, (rows, 128), "bfloat16")
        y = T.match_buffer(y_ptr, (rows, 128), "bfloat16")
        T.device_entry()
        row = T.cta_id([rows])
        column = T.thread_id([128])
        y[row, column] = T.Cast("bfloat16", T.Cast("float32", x[row, column]) * T.float32(2))
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    return tvm.compile(tvm.IRModule({"main": double}), target=target, tir_pipeline="tirx")

def launch(x, y):
    build(x.shape[0])(x, y)

def solve(x):
    y = torch.empty_like(x)
    launch(x, y)
    return y
"""
BY_DSL = {"cute": CUTE, "tirx": TIRX}


def with_solve(dsl: str, body: str, head: str = "", arguments: str = "x") -> str:
    """The submission of that DSL with another ``solve``; ``body`` is its indented code."""
    start = BY_DSL[dsl].index("def solve")
    return f"{BY_DSL[dsl][:start]}{head}\ndef solve({arguments}):\n{body}\n"


def record(
    source: str,
    dsl: str,
    inputs: tuple[Input, ...] = INPUTS,
    outputs: tuple[OutputSpec, ...] = OUTPUTS,
    **limits: float,
) -> Recording:
    """Record on this run's server."""
    call = Call(inputs, outputs, len(outputs) > 1)
    request = RecordRequest(source, dsl, (call,), Limits(**limits))  # type: ignore[arg-type]
    return RecorderClient().record(request)


def plan_of(
    source: str, dsl: str, inputs: tuple[Input, ...] = INPUTS, outputs: tuple[OutputSpec, ...] = OUTPUTS
) -> LaunchPlan:
    """The plan of a submission that must give one."""
    recording = record(source, dsl, inputs, outputs)
    assert recording.failure is None, recording
    (plan,) = recording.plans
    return decode(plan)


def failure_of(source: str, dsl: str, inputs: tuple[Input, ...] = INPUTS, **limits: float) -> Failure:
    """The failure of a submission that must give none."""
    recording = record(source, dsl, inputs, **limits)
    assert recording.failure is not None, "the submission was recorded"
    return recording.failure
