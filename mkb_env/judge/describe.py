"""What a recording needs to know of a workload: shapes, dtypes, scalars, and the geometry the host may read."""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.contract import Problem, Shape
from mkb_env.recorder.protocol import Call, Input, OutputSpec, ScalarInput, TensorInput


def describe(problem: Problem, shape: Shape) -> Call:
    """What a call of ``solve`` at ``shape`` is given and must return. Draws nothing."""
    geometry = problem.geometry(shape) if problem.geometry else {}
    inputs: list[Input] = []
    for name, spec in zip(problem.inputs, problem.input_specs(shape), strict=True):
        if isinstance(spec, tuple):
            sizes, dtype = spec
            inputs.append(TensorInput(tuple(sizes), _dtype(dtype), _host_values(geometry.get(name), dtype)))
        else:
            inputs.append(ScalarInput(spec))
    outputs = tuple(OutputSpec(tuple(sizes), _dtype(dtype)) for sizes, dtype in problem.output_specs(shape))
    return Call(tuple(inputs), outputs, len(outputs) > 1)


def _host_values(values: Any, dtype: torch.dtype) -> bytes | None:
    return None if values is None else torch.tensor(values, dtype=dtype).numpy().tobytes()


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
