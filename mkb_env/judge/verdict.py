"""The verdict on one submission: one typed record, used unchanged by the environment, the store, reports and agents."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from mkb_env.devices.base import KernelInfo
from mkb_env.recorder.protocol import MAX_MESSAGE, SourceLocation, clip

__all__ = [
    "MAX_MESSAGE",
    "Evaluation",
    "Interval",
    "OutputDiff",
    "SourceLocation",
    "Stage",
    "Timing",
    "Verdict",
    "clip",
]


class Stage(StrEnum):
    """Where a submission's judging ended. A closed set."""

    REJECTED = "rejected"
    """Refused before anything ran: does not parse, breaks a rule of the contract."""
    COMPILE_ERROR = "compile_error"
    HOST_ERROR = "host_error"
    """``solve`` raised, or asked for something a recording does not allow."""
    LAUNCH_ERROR = "launch_error"
    """The device code faulted, or could not be launched."""
    TIMEOUT = "timeout"
    INCORRECT = "incorrect"
    PASSED = "passed"
    UNSUPPORTED = "unsupported"
    """Our simulator lacks something the kernel uses. Not the agent's fault; costs no step."""
    INFRA_ERROR = "infra_error"
    """Our side failed. Not the agent's fault; costs no step."""

    @property
    def costs_step(self) -> bool:
        """Whether a submission that ended here uses up one of the episode's submissions."""
        return self not in (Stage.UNSUPPORTED, Stage.INFRA_ERROR)


class OutputDiff(msgspec.Struct, frozen=True):
    """How one output differs from the reference, on the worst draw."""

    name: str
    """``output[0]`` and so on, in the reference's order."""
    shape: tuple[int, ...]
    dtype: str
    passed: bool
    max_abs_error: float
    """|error| against the fp64 anchor at the worst place, that with the largest share of its allowance; infinite where
    a NaN or Inf is out of place."""
    allowance: float
    worst_index: tuple[int, ...] = ()
    got: float | None = None
    want: float | None = None
    share_outside: float = 0.0
    """Share of the elements outside the allowance."""
    nan_count: int = 0
    inf_count: int = 0
    pattern: str = ""
    """A guess at the shape of the fault: unwritten elements, a tile, a row, a head, the tail."""


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


class Timing(msgspec.Struct, frozen=True):
    """Times in microseconds; medians over the draws."""

    kernel_us: float
    baseline_us: float
    speedup: Interval
    """Baseline over kernel, end to end: the scored number."""
    device_speedup: Interval | None
    """The same inside CUDA graphs, or None where the reference cannot be captured or the times are simulated."""
    draws: int
    simulated: bool
    """True: an estimate by the simulator's model, not a measurement."""
    device: str
    bound_us: float = 0.0
    """The least time that the problem's bytes and operations take: the roofline, by measured ceilings if there are."""
    roofline: float = 0.0
    """The bound over the kernel's time, at most 1."""
    impossible: bool = False
    """Whether the time is below what the device's peaks allow: no such time can be right."""


class Evaluation(msgspec.Struct, frozen=True):
    """What running a plan on a device showed."""

    stage: Stage
    message: str
    diffs: tuple[OutputDiff, ...] = ()
    timing: Timing | None = None
    kernels: tuple[KernelInfo, ...] = ()
    seconds: dict[str, float] = {}
    """Wall clock by stage: draw, load, check, reference (with its fp64 anchor), timing."""
    seeds_sha256: str = ""
    device: str = ""
    simulated: bool = True
    versions: dict[str, str] = {}


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of one submission."""

    stage: Stage
    problem: str
    dsl: str
    workload: str
    message: str
    hint: str = ""
    error_class: str = ""
    location: SourceLocation | None = None
    log: str = ""
    """Tail of what the submission printed."""
    diffs: tuple[OutputDiff, ...] = ()
    timing: Timing | None = None
    kernels: tuple[KernelInfo, ...] = ()
    seconds: dict[str, float] = {}
    device: str = ""
    simulated: bool = True
    source_sha256: str = ""
    plan_sha256: str = ""
    seeds_sha256: str = ""
    versions: dict[str, str] = {}

    @property
    def passed(self) -> bool:
        return self.stage is Stage.PASSED

    @property
    def speedup(self) -> float:
        """The scored speedup over the eager reference; 0.0 unless the submission passed and was timed."""
        return self.timing.speedup.value if self.passed and self.timing else 0.0

    def to_json(self) -> str:
        """The record as one JSON object with stable keys; floats that JSON lacks are ``"inf"``, ``"nan"`` and so on."""
        return msgspec.json.encode(_jsonable(msgspec.to_builtins(self))).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Verdict:
        """Inverse of :meth:`to_json`. Raises msgspec.ValidationError on anything else."""
        # not strict: floats may come as strings
        return msgspec.json.decode(text, type=Verdict, strict=False)


def _jsonable(value: Any) -> Any:
    """``value`` with its non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, list | tuple) else value
