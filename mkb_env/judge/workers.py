"""What a judge has its work done by: a recorder and an evaluator, of this machine or of a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mkb_env.recorder.client import RecorderClient
from mkb_env.recorder.protocol import Recording, RecordRequest
from mkb_env.servers.client import Outcome, ServerClient

DEVICES = "auto, simulator, cuda, cuda:N or ray"
"""The devices that users are told of; ``ray:simulator`` and ``ray:cuda`` choose among a cluster's."""
ROOMS = ("judge", "devices", "problems", "recorder")


class Recorder(Protocol):
    """Turns sources into plans. Called from several threads."""

    def record(
        self, request: RecordRequest, on_progress: Callable[[str], None] | None = None, priority: int = 0
    ) -> Recording:
        """The plans of a submission, or why there is none. Never raises for what the submission does."""


class Evaluator(Protocol):
    """Does the jobs of :mod:`mkb_env.judge.jobs`. Called from several threads."""

    def call(
        self,
        payload: bytes,
        *,
        seconds: float,
        memory_bytes: int = 0,
        priority: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run one job and wait for its end. Raises ServerError if our side fails."""


@dataclass(frozen=True)
class Workers:
    """Who does the work of one device, and how much of it at a time."""

    recorder: Recorder
    evaluator: Evaluator
    device: str
    """What runs the plans: ``simulator``, ``cuda`` or ``cuda:N``."""
    place: str
    """Devices of one place share its recorders."""
    recorders: int
    """Recordings at a time."""
    evaluators: int
    """Evaluations at a time that keep every device busy."""


def check_device(device: str) -> None:
    """Refuse the name of no device, and ``ray`` without the extra.

    Raises:
        ValueError: in one sentence that says what is wrong.
    """
    if not re.fullmatch(r"auto|simulator|cuda(:\d+)?|ray(:simulator|:cuda)?", device):
        raise ValueError(f"device must be {DEVICES}, got {device!r}")
    if device.startswith("ray"):
        found = importlib.util.find_spec("ray")
        if found is None or found.origin is None:  # a folder of that name is no package
            raise ValueError(f'device "{device}" needs Ray, which is not installed: pip install "mkb-env[ray]"')
        import mkb_env.devices.ray  # noqa: F401 - notices forks from here on


def evaluator_server(device: str) -> ServerClient:
    """The evaluator of this machine for ``simulator``, ``cuda`` or ``cuda:N``."""
    kind, _, ordinal = device.partition(":")
    if kind == "simulator":
        return ServerClient("mkb_env.judge.evaluator", ROOMS)
    return ServerClient("mkb_env.judge.evaluator", ROOMS, "serial", ordinal or "0")


def hire(device: str) -> Workers:
    """The workers of a device.

    Raises:
        ServerError: if there is no such cluster, or it has no such device.
    """
    if device.startswith("ray"):
        from mkb_env.devices.ray import hire_from_cluster

        return hire_from_cluster(device.partition(":")[2])
    if device == "auto":
        from mkb_env.devices.cuda import available

        device = "simulator" if available() else "cuda"
    return Workers(RecorderClient(), evaluator_server(device), device, "here", os.cpu_count() or 1, 1)
