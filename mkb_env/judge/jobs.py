"""What the judge asks an evaluator to do. Light to import."""

from __future__ import annotations

import msgspec

from mkb_env.recorder.protocol import Call


class DescribeJob(msgspec.Struct, frozen=True, tag="describe"):
    """Describe every shape of a workload (see :mod:`mkb_env.judge.describe`)."""

    problem: str
    workload: str


class Described(msgspec.Struct, frozen=True):
    """One shape of a workload."""

    call: Call
    fits_simulator: bool
    """Whether the simulator can judge it in its time and memory."""


class FactsJob(msgspec.Struct, frozen=True, tag="facts"):
    """Say what is known of these problems (see :mod:`mkb_env.judge.facts`)."""

    problems: tuple[str, ...]


class TensorFacts(msgspec.Struct, frozen=True):
    """An input or output at the full shape; a scalar has no sizes and its Python type as dtype."""

    name: str
    sizes: tuple[int, ...]
    dtype: str


class Facts(msgspec.Struct, frozen=True):
    """What is known of a problem, at its full shape."""

    slug: str
    number: int
    family: str
    title: str
    model: str
    dtype: str
    shape: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    bytes: int
    """The least that one call moves."""
    flops: int
    unit: str
    """What computes them: ``bf16``, ``fp8``, ``tf32``, ``3xtf32`` (tensor cores) or ``fp32`` (CUDA cores)."""
    roofline_us: float
    """The least time on an H200, by its datasheet's peaks."""
    memory_bound: bool
    """Whether that is the time to move the bytes."""
    kernels: tuple[str, ...]
    """DSLs that have a verified kernel here."""

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


class EvaluateJob(msgspec.Struct, frozen=True, tag="evaluate"):
    """Judge a plan at one shape of a workload."""

    problem: str
    workload: str
    shape: int
    plan: bytes
    timing: bool = True
    draws: int = 5


class SpreadJob(msgspec.Struct, frozen=True, tag="spread"):
    """Time a plan against itself (see :mod:`mkb_env.judge.spread`)."""

    problem: str
    workload: str
    shape: int
    plan: bytes
    comparisons: int


class Spread(msgspec.Struct, frozen=True):
    """What A/A comparisons showed."""

    comparisons: int
    kernel_us: float
    """Median time of the kernel."""
    covered: float
    """Share of the 95 % intervals that hold 1."""
    half_width: float
    """Median half-width of the intervals."""
    largest_error: float
    """The ratio farthest from 1, as a distance."""


class DeviceJob(msgspec.Struct, frozen=True, tag="device"):
    """Name the device."""


class MeasureJob(msgspec.Struct, frozen=True, tag="measure"):
    """Measure the device's ceilings (see :mod:`mkb_env.judge.ceilings`)."""


Job = DescribeJob | FactsJob | EvaluateJob | DeviceJob | MeasureJob | SpreadJob
