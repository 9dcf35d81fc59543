"""A problem small enough to write its kernels in PTX by hand: y = 2 x + bias, fp32, one thread per element."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from mkb_env.plan import Buffer, Image, Launch, LaunchPlan, OutputTree, Param, Pointer, TensorView
from mkb_env.problems.contract import Cost, Problem, ProblemRef

WIDTH = 64
SHAPE = {"rows": 6}


def make_inputs(generator: torch.Generator, shape: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    device = generator.device
    return (
        torch.randn(shape["rows"], WIDTH, generator=generator, device=device),
        torch.randn(WIDTH, generator=generator, device=device),
    )


def reference(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return 2 * x + bias


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "ref": ProblemRef("toy", "mlp_norm"),
        "module": types.ModuleType("toy"),
        "task": "y = 2 x + bias",
        "title": "toy",
        "number": 0,
        "model": "none",
        "inputs": ("x", "bias"),
        "outputs": ("y",),
        "host_visible": (),
        "workloads": {"small": SHAPE},
        "input_specs": lambda shape: (((shape["rows"], WIDTH), torch.float32), ((WIDTH,), torch.float32)),
        "make_inputs": make_inputs,
        "output_specs": lambda shape: (((shape["rows"], WIDTH), torch.float32),),
        "reference": reference,
        "cost": lambda shape: Cost(bytes=8 * shape["rows"] * WIDTH, flops=2 * shape["rows"] * WIDTH, unit="fp32"),
    }
    return Problem(**{**fields, **changes})


PTX = """
.version 7.8
.target sm_90
.address_size 64
.global .align 4 .u32 calls;
.visible .entry toy(.param .u64 p_x, .param .u64 p_bias, .param .u64 p_y)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .f32 %f<8>;
    .reg .b64 %rd<16>;
    ld.param.u64 %rd1, [p_x];
    ld.param.u64 %rd2, [p_bias];
    ld.param.u64 %rd3, [p_y];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    cvta.to.global.u64 %rd3, %rd3;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.u32 %r4, %r1, %r3, %r2;
    mul.wide.u32 %rd4, %r4, 4;
    mul.wide.u32 %rd5, %r2, 4;
    add.u64 %rd6, %rd1, %rd4;
    add.u64 %rd7, %rd2, %rd5;
    add.u64 %rd8, %rd3, %rd4;
    ld.global.f32 %f1, [%rd6];
    ld.global.f32 %f2, [%rd7];
    mov.f32 %f3, 0f40000000;
    {body}
    st.global.f32 [%rd8], %f4;
DONE:
    ret;
}}
"""
RIGHT = "fma.rn.f32 %f4, %f1, %f3, %f2;"
DRIFT = """
    fma.rn.f32 %f4, %f1, %f3, %f2;
    mov.u64 %rd9, calls;
    setp.ne.u32 %p1, %r4, 0;
    @%p1 bra COUNTED;
    atom.global.add.u32 %r5, [%rd9], 1;
COUNTED:
    ld.global.u32 %r6, [%rd9];
    setp.gt.u32 %p2, %r6, {calls};
    @%p2 add.f32 %f4, %f4, %f3;
"""
"""Right for about ``calls`` calls, then wrong by 2: a kernel that knows when the checks are over."""
BODIES = {
    "scaled": "fma.rn.f32 %f4, %f1, %f3, %f2; mul.f32 %f4, %f4, 0f3F000000;",
    "no tail": f"setp.gt.u32 %p1, %r1, 3; @%p1 bra DONE; {RIGHT}",
    "writes input": f"{RIGHT} st.global.f32 [%rd7], %f3;",
    "out of bounds": f"{RIGHT} add.u64 %rd8, %rd8, 1073741824;",
    "past the input": f"ld.global.f32 %f2, [%rd2+256]; {RIGHT}",
    "before the output": f"{RIGHT} st.global.f32 [%rd3+-4], %f4;",
    "endless": f"{RIGHT}\nAGAIN: setp.ne.u64 %p1, %rd3, 0; @%p1 bra AGAIN;",
}


def pointer(buffer: int) -> Param:
    return Param(bytes(8), (Pointer(0, buffer, 0),))


def plan(body: str = RIGHT, rows: int = SHAPE["rows"], **changes: Any) -> LaunchPlan:
    """A plan of one launch; ``changes`` replace its fields."""
    fields: dict[str, Any] = {
        "version": 1,
        "dsl": "cute",
        "target": "sm_90a",
        "buffers": (Buffer(4 * rows * WIDTH, 0), Buffer(4 * WIDTH, 1), Buffer(4 * rows * WIDTH)),
        "images": (Image(PTX.format(body=body), b""),),
        "steps": (Launch(0, "toy", (rows, 1, 1), (WIDTH, 1, 1), (pointer(0), pointer(1), pointer(2))),),
        "outputs": (view(2, (rows, WIDTH)),),
        "output_tree": OutputTree("tensor"),
    }
    return LaunchPlan(**{**fields, **changes})


def view(buffer: int, shape: tuple[int, ...], offset: int = 0, strides: tuple[int, ...] | None = None) -> TensorView:
    dense = tuple(torch.empty(shape, device="meta").stride())
    return TensorView(buffer, offset, shape, strides or dense, "float32")


def logged(function: Callable[..., Any], log: list[str], word: str) -> Callable[..., Any]:
    """``function``, noting each call in ``log``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(word)
        return function(*args, **kwargs)

    return call
