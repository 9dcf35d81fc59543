"""What is known of a problem before anyone solves it: its size, its cost, and the least time that cost takes."""

from __future__ import annotations

import torch

from mkb_env.judge.jobs import Facts, TensorFacts
from mkb_env.judge.roofline import bound_us, is_memory_bound
from mkb_env.problems import DSLS, Problem
from mkb_env.problems.contract import Shape, Spec

DTYPE_WORDS = ("bf16", "fp32", "fp8", "nvfp4", "uint8", "int32", "int64")


def dtype_of(slug: str) -> str:
    """The data type that a slug ends with: ``bf16``, or ``int32/int64`` where it names two."""
    words = slug.split("_")
    named = [word for word in words[-2:] if word in DTYPE_WORDS]
    return "/".join(named)


def facts(problem: Problem) -> Facts:
    """The facts of a problem at its full shape."""
    shape = problem.shapes("full")[0]
    cost = problem.cost(shape)
    return Facts(
        slug=problem.slug,
        number=problem.number,
        family=problem.ref.family,
        title=problem.title,
        model=problem.model,
        dtype=dtype_of(problem.slug),
        shape=summary(shape),
        inputs=_tensors(problem.inputs, problem.input_specs(shape)),
        outputs=_tensors(problem.outputs, problem.output_specs(shape)),
        bytes=cost.bytes,
        flops=cost.flops,
        unit=cost.unit,
        roofline_us=bound_us(cost),
        memory_bound=is_memory_bound(cost),
        kernels=tuple(dsl for dsl in DSLS if problem.ref.baseline(dsl)),
    )


def summary(shape: Shape) -> str:
    """A shape in one line: long lists by their number of entries and their sum."""

    def short(value: object) -> str:
        if isinstance(value, list) and len(value) > 4:
            if all(isinstance(item, int) for item in value):
                return f"{len(value)} values, sum {sum(value)}"
            if all(isinstance(item, list) and len(item) == len(value[0]) for item in value):
                return f"{len(value)} values, sums {[sum(column) for column in zip(*value, strict=True)]}"
            return f"{len(value)} values"
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{key} {short(value)}" for key, value in shape.items())


def _tensors(names: tuple[str, ...], specs: tuple[Spec, ...]) -> tuple[TensorFacts, ...]:
    return tuple(
        TensorFacts(name, tuple(spec[0]), _dtype(spec[1]))
        if isinstance(spec, tuple)
        else TensorFacts(name, (), type(spec).__name__)
        for name, spec in zip(names, specs, strict=True)
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
