"""What a recording needs to know of a workload: shapes, dtypes, scalars, and the geometry the host may read.

The inputs are made by the problem itself, but with every random draw replaced by uninitialised memory: a description
costs no time and, as untouched pages are not backed, next to no memory even at full size.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.contract import Problem, Shape
from mkb_env.recorder.dispatch import QuickDispatchMode
from mkb_env.recorder.protocol import Call, Input, OutputSpec, ScalarInput, TensorInput


class _NoDraws(QuickDispatchMode):
    """Turns random operators into allocations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[-1]
        if name in ("normal_", "uniform_", "random_", "exponential_", "bernoulli_", "log_normal_", "cauchy_"):
            return args[0]
        if name in ("rand", "randn", "randint", "randperm"):
            # integer draws must stay in range, as later indexing may use them; zero is in every range
            make = torch.zeros if name in ("randint", "randperm") else torch.empty
            sizes = next((a for a in args if isinstance(a, list | tuple)), None) or [args[0]]
            dtype = kwargs.get("dtype") or (torch.int64 if make is torch.zeros else torch.float32)
            return make(sizes, dtype=dtype, device=kwargs.get("device"))
        return func(*args, **kwargs)


def describe(problem: Problem, shape: Shape) -> Call:
    """What a call of ``solve`` at ``shape`` is given and must return."""
    with _NoDraws(), torch.no_grad():
        values = problem.make_inputs(torch.Generator().manual_seed(0), shape)
    inputs: list[Input] = []
    for name, value in zip(problem.inputs, values, strict=True):
        if isinstance(value, torch.Tensor):
            inputs.append(TensorInput(tuple(value.shape), _dtype(value.dtype), _host_values(problem, name, value)))
        else:
            inputs.append(ScalarInput(value))
    outputs = tuple(OutputSpec(tuple(dims), _dtype(dtype)) for dims, dtype in problem.output_specs(shape))
    return Call(tuple(inputs), outputs, len(outputs) > 1)


def _host_values(problem: Problem, name: str, value: torch.Tensor) -> bytes | None:
    return value.contiguous().numpy().tobytes() if name in problem.host_visible else None


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
