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


class EvaluateJob(msgspec.Struct, frozen=True, tag="evaluate"):
    """Judge a plan at one shape of a workload."""

    problem: str
    workload: str
    shape: int
    plan: bytes
    timing: bool = True
    draws: int = 5


class DeviceJob(msgspec.Struct, frozen=True, tag="device"):
    """Name the device."""


Job = DescribeJob | EvaluateJob | DeviceJob
