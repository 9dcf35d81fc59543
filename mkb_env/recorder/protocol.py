"""What goes into the recorder and what comes out: plain data, readable without torch or a DSL."""

from __future__ import annotations

from typing import Literal

import msgspec

FAILURE_KINDS = ("rejected", "compile_error", "host_error", "launch_error", "timeout", "unsupported", "infra_error")
FailureKind = Literal[
    "rejected", "compile_error", "host_error", "launch_error", "timeout", "unsupported", "infra_error"
]


class TensorInput(msgspec.Struct, frozen=True, tag="tensor"):
    """A tensor argument of ``solve``: contiguous, without its values unless the host may see them."""

    shape: tuple[int, ...]
    dtype: str
    host_values: bytes | None = None
    """Little-endian values of an integer tensor that describes the workload's geometry, else None."""


class ScalarInput(msgspec.Struct, frozen=True, tag="scalar"):
    """A Python scalar argument of ``solve``."""

    value: bool | int | float


Input = TensorInput | ScalarInput


class OutputSpec(msgspec.Struct, frozen=True):
    """One tensor that ``solve`` must return."""

    shape: tuple[int, ...]
    dtype: str


class Limits(msgspec.Struct, frozen=True):
    """Bounds on one recording."""

    seconds: float = 60.0
    """Wall clock from the fork to the finished plan."""
    memory_bytes: int = 4 << 30
    """Private memory the submission may add to the warm parent's."""


class Call(msgspec.Struct, frozen=True):
    """One call of ``solve``."""

    inputs: tuple[Input, ...]
    outputs: tuple[OutputSpec, ...]
    returns_tuple: bool
    """Whether the reference returns a tuple (else one bare tensor)."""


class RecordRequest(msgspec.Struct, frozen=True):
    """One submission to record, at one or several shapes: it is imported once and ``solve`` is called for each."""

    source: str
    dsl: str
    calls: tuple[Call, ...]
    limits: Limits = Limits()


class SourceLocation(msgspec.Struct, frozen=True):
    """A place in the submitted source; line and column count from 1."""

    line: int
    column: int = 0
    text: str = ""
    """The source line."""


class Failure(msgspec.Struct, frozen=True):
    """Why there is no plan, in words an agent can act on."""

    kind: FailureKind
    message: str
    error_class: str = ""
    location: SourceLocation | None = None
    hint: str = ""


class Recording(msgspec.Struct, frozen=True):
    """The recorder's answer: one encoded, not yet validated plan per call, until the first failure."""

    plans: tuple[bytes, ...] = ()
    failure: Failure | None = None
    log: str = ""
    """Tail of what the submission printed."""
    seconds: dict[str, float] = {}
    """Wall clock by stage: import, solve (compilation included), and record, the whole job."""
    sandbox: tuple[str, ...] = ()
    """Isolation in force, for example ``("network", "files", "memory", "time")``."""


MAX_MESSAGE = 4000
"""Characters of a message that are kept, from its head and its tail."""


def clip(text: str, limit: int = MAX_MESSAGE) -> str:
    """``text``, or its head and tail around a note of what was left out, at most ``limit`` characters."""
    if len(text) <= limit:
        return text
    keep = limit - 60
    head = keep * 2 // 3
    return f"{text[:head]}\n[... {len(text) - keep} characters left out ...]\n{text[-(keep - head) :]}"
