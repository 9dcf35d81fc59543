"""A device that runs a Python function in place of a plan: for checks of problems and of the judge itself.

The function is trusted code, a variant of a reference. Submissions never get here: they are recorded, and their plans
run on the other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.devices.base import POISON_BYTE, KernelInfo
from mkb_env.plan import DTYPE_BYTES, Buffer, LaunchPlan, OutputTree, TensorView
from mkb_env.problems.contract import Problem, Shape

Value = torch.Tensor | bool | int | float


def outline(problem: Problem, shape: Shape) -> LaunchPlan:
    """A plan that launches nothing, with the outputs that the problem asks for at ``shape``."""
    buffers, views = [], []
    for position, (sizes, dtype) in enumerate(problem.output_specs(shape)):
        name = str(dtype).removeprefix("torch.")
        buffers.append(Buffer(math.prod(sizes) * DTYPE_BYTES[name]))
        strides = tuple(torch.empty(tuple(sizes), device="meta").stride())
        views.append(TensorView(position, 0, tuple(sizes), strides, name))
    children = tuple(OutputTree("tensor") for _ in views)
    tree = OutputTree("tuple", children) if len(views) > 1 else OutputTree("tensor")
    return LaunchPlan(
        version=1,
        dsl="cute",
        target="sm_90a",
        buffers=tuple(buffers),
        images=(),
        steps=(),
        outputs=tuple(views),
        output_tree=tree,
    )


class FunctionDevice:
    """Runs ``function(*inputs)`` on ``torch_device``; its results are copied into the plan's outputs."""

    simulated = False

    def __init__(self, function: Callable[..., Any], torch_device: torch.device) -> None:
        self.function, self.torch_device = function, torch_device
        self.name = f"function on {torch_device}"

    def load(self, plan: LaunchPlan) -> _Loaded:
        return _Loaded(self, plan)

    def synchronize(self) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


class _Loaded:
    kernels: tuple[KernelInfo, ...] = ()

    def __init__(self, device: FunctionDevice, plan: LaunchPlan) -> None:
        self.device, self.plan = device, plan

    def bind(self, inputs: Sequence[Value]) -> _Bound:
        return _Bound(self, inputs)

    def estimate_us(self) -> float | None:
        return None

    def close(self) -> None:
        """Nothing is loaded."""


class _Bound:
    def __init__(self, loaded: _Loaded, inputs: Sequence[Value]) -> None:
        self.function, self.inputs = loaded.device.function, inputs
        device = loaded.device.torch_device
        self.outputs = tuple(
            torch.empty(view.shape, dtype=getattr(torch, view.dtype), device=device) for view in loaded.plan.outputs
        )

    def poison(self) -> None:
        for output in self.outputs:
            output.flatten().view(torch.uint8).fill_(POISON_BYTE)

    def run(self) -> None:
        with torch.no_grad():
            results = self.function(*self.inputs)
        results = results if isinstance(results, tuple) else (results,)
        for output, result in zip(self.outputs, results, strict=True):
            if (output.shape, output.dtype) != (result.shape, result.dtype):
                raise TypeError(
                    f"a variant returned {tuple(result.shape)} {result.dtype} where {tuple(output.shape)} "
                    f"{output.dtype} was expected; make it return what output_specs says"
                )
            output.copy_(result)
