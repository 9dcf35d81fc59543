"""Compiles CUDA C with NVRTC and runs kernels on the simulator, from launch plans as the judge gives them."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch
from cuda.bindings import nvrtc

from mkb_env.devices.simulator import SimulatorDevice
from mkb_env.devices.simulator.parser import parse_module
from mkb_env.plan import Buffer, Image, Launch, LaunchPlan, OutputTree, Param, Pointer, TensorView, decode, encode

Dim = int | tuple[int, int, int]


@cache
def ptx_of(source: str) -> str:
    """PTX of CUDA C for sm_90a."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_90a"])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.rstrip(b"\0 ").decode()


def _dim3(value: Dim) -> tuple[int, int, int]:
    return (value, 1, 1) if isinstance(value, int) else value


def plan_of(
    ptx: str, arguments: tuple[Any, ...], grid: Dim = 1, block: Dim = 32, shared: int = 0, cooperative: bool = False
) -> tuple[LaunchPlan, list[torch.Tensor]]:
    """A plan of one launch of the only kernel, and its tensors. Tensors are inputs; int, float and bytes are values."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    params = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            index = next(i for i, tensor in enumerate(tensors) if tensor is argument)
            params.append(Param(bytes(8), (Pointer(0, index, 0),)))
        elif isinstance(argument, bytes):
            params.append(Param(argument))
        else:
            params.append(Param(struct.pack("<f" if isinstance(argument, float) else "<i", argument)))
    plan = LaunchPlan(
        version=1,
        dsl="cute",
        target="sm_90a",
        buffers=tuple(Buffer(tensor.nbytes, number) for number, tensor in enumerate(tensors)),
        images=(Image(ptx, b""),),
        steps=(
            Launch(
                0,
                parse_module(ptx).entries[0].name,
                _dim3(grid),
                _dim3(block),
                tuple(params),
                shared_bytes=shared,
                cooperative=cooperative,
            ),
        ),
        outputs=(TensorView(0, 0, tuple(tensors[0].shape), tensors[0].stride(), str(tensors[0].dtype)[6:]),),
        output_tree=OutputTree("tensor"),
    )
    return decode(encode(plan)), tensors


def run_ptx(
    ptx: str,
    *arguments: Any,
    grid: Dim = 1,
    block: Dim = 32,
    shared: int = 0,
    cooperative: bool = False,
    device: SimulatorDevice | None = None,
) -> None:
    """Run the only kernel of ``ptx``; tensor arguments are changed in place."""
    plan, tensors = plan_of(ptx, arguments, grid, block, shared, cooperative)
    (device or SimulatorDevice(time_limit=60)).load(plan).bind(tensors).run()


def run_cuda(source: str, *arguments: Any, **options: Any) -> None:
    """:func:`run_ptx` of CUDA C."""
    run_ptx(ptx_of(source), *arguments, **options)


def fault_of(run: Any, *arguments: Any, **options: Any) -> Any:
    """The DeviceFault that a run ends in."""
    from mkb_env.devices.base import DeviceFault

    try:
        run(*arguments, **options)
    except DeviceFault as fault:
        return fault
    raise AssertionError("the run ended without a fault")
