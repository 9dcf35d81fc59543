"""The judge's side of the recorder. Light to import."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from mkb_env.recorder.cache import RecordingCache
from mkb_env.recorder.protocol import FAILURE_KINDS, Failure, Recording, RecordRequest, SourceLocation
from mkb_env.servers.client import Outcome, ServerClient, ServerError, signal_name

CHILD_KINDS = frozenset(FAILURE_KINDS) - {"timeout", "unsupported", "infra_error"}
"""What a recording may say of itself: the rest would cost it nothing, so only this side says it."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
STAGES = ("import", "solve", "record")
MAX_TEXT, MAX_LOG, MAX_LINE, MAX_LINES = 8000, 4000, 1000, 300_000

HINT_CRASH = (
    "host code must not read tensor data through raw pointers; tensors have addresses but no data while recording"
)


class RecorderClient:
    """Records submissions on this machine's recorder server, unless the cache has them."""

    def __init__(self) -> None:
        self.cache = RecordingCache.from_environment()
        self.server = ServerClient("mkb_env.recorder.service", rooms=("recorder", "dsl"))

    def record(
        self, request: RecordRequest, on_progress: Callable[[str], None] | None = None, priority: int = 0
    ) -> Recording:
        """The plans of a submission, or why there is none. Never raises for what the submission does."""
        cached = self.cache.get(request) if self.cache else None
        if cached:
            return cached
        recording = self._record(request, on_progress, priority)
        if self.cache:
            self.cache.put(request, recording)
        return recording

    def _record(self, request: RecordRequest, on_progress: Callable[[str], None] | None, priority: int) -> Recording:
        limits = request.limits
        try:
            outcome = self.server.call(
                msgspec.msgpack.encode(request),
                seconds=limits.seconds,
                memory_bytes=limits.memory_bytes,
                priority=priority,
                on_progress=on_progress,
            )
        except ServerError as error:
            return Recording(failure=Failure("infra_error", f"the recorder failed: {error}"))
        return self._judge(outcome, request)

    def _judge(self, outcome: Outcome, request: RecordRequest) -> Recording:
        if outcome.result is None:
            return Recording(failure=how_it_ended(outcome, request), sandbox=outcome.ended.sandbox)
        sandbox = outcome.ended.sandbox
        try:
            recording = msgspec.msgpack.decode(outcome.result, type=Recording)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError, RecursionError):
            return Recording(failure=_broken("its answer is not a recording"), sandbox=sandbox)
        failure = recording.failure
        if len(recording.plans) > len(request.calls) or (failure is None and len(recording.plans) < len(request.calls)):
            return Recording(failure=_broken("it does not hold a plan per call"), sandbox=sandbox)
        log, seconds = plain(recording.log, MAX_LOG), _times(recording.seconds)
        return Recording(recording.plans, failure and _trimmed(failure), log, seconds, sandbox)


def _broken(how: str) -> Failure:
    return Failure("host_error", f"the submission broke the recording: {how}")


def _trimmed(failure: Failure) -> Failure:
    """A failure as told by untrusted code: of a kind that it may claim, and of bounded size."""
    place = failure.location
    if place is not None:
        text = plain(place.text, MAX_LINE)
        place = SourceLocation(min(max(place.line, 0), MAX_LINES), min(max(place.column, 0), len(text) + 1), text)
    return Failure(
        failure.kind if failure.kind in CHILD_KINDS else "host_error",
        plain(failure.message, MAX_TEXT),
        plain(failure.error_class, 100),
        place,
        plain(failure.hint, 1000),
    )


def plain(text: str, limit: int) -> str:
    """At most ``limit`` characters of a text, without terminal controls."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text[:limit])


def _times(seconds: dict[str, float]) -> dict[str, float]:
    """The stages this side knows, with times that can be times."""
    return {name: seconds[name] for name in STAGES if 0 <= seconds.get(name, -1.0) < 1e6}


def how_it_ended(outcome: Outcome, request: RecordRequest) -> Failure:
    """A failure for a recording that ended without an answer."""
    if not outcome.stage:  # the submission's code runs only after the first stage is reported
        return Failure("infra_error", f"the recorder failed before the submission ran: {outcome.ended}")
    ended, stage = outcome.ended, outcome.stage
    doing = {"import": "importing the source", "solve": "running solve (compiling and host code)"}.get(stage, stage)
    if ended.timed_out:
        seconds = f"{request.limits.seconds:g} s"
        return Failure(
            "timeout", f"not finished after {seconds} while {doing}; host code and compilation have {seconds} in all"
        )
    if ended.signal is not None:
        name = signal_name(ended.signal)
        limit = f"{request.limits.memory_bytes >> 20} MiB"
        why = f" (killed; memory is limited to {limit})" if name == "SIGKILL" else ""
        return Failure(
            "host_error", f"the submission's process ended with {name} while {doing}{why}", name, hint=HINT_CRASH
        )
    if ended.exit_code == 70:
        return Failure("host_error", f"the submission broke the recording while {doing}")
    return Failure("host_error", f"the submission ended its process with exit code {ended.exit_code} while {doing}")
