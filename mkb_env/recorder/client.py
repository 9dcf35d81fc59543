"""The judge's side of the recorder. Light to import."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mkb_env.recorder.protocol import FAILURE_KINDS, Failure, Recording, RecordRequest
from mkb_env.servers.client import Outcome, ServerClient, ServerError, signal_name

CHILD_KINDS = frozenset(FAILURE_KINDS) - {"timeout", "unsupported", "infra_error"}
"""What a recording may say of itself: the rest would cost it nothing, so only this side says it."""

HINT_CRASH = (
    "host code must not read tensor data through raw pointers; tensors have addresses but no data while recording"
)


class RecorderClient:
    """Records submissions on this machine's recorder server."""

    def __init__(self) -> None:
        self.server = ServerClient("mkb_env.recorder.service", rooms=("recorder", "dsl"))

    def record(self, request: RecordRequest, on_progress: Callable[[str], None] | None = None) -> Recording:
        """The plans of a submission, or why there is none. Never raises for what the submission does."""
        limits = request.limits
        try:
            outcome = self.server.call(
                msgspec.msgpack.encode(request),
                seconds=limits.seconds,
                memory_bytes=limits.memory_bytes,
                on_progress=on_progress,
            )
        except ServerError as error:
            return Recording(failure=Failure("infra_error", f"the recorder failed: {error}"))
        return self._judge(outcome, request)

    def _judge(self, outcome: Outcome, request: RecordRequest) -> Recording:
        if outcome.result is None:
            return Recording(failure=how_it_ended(outcome, request), sandbox=outcome.ended.sandbox)
        try:
            recording = msgspec.msgpack.decode(outcome.result, type=Recording)
        except (msgspec.DecodeError, msgspec.ValidationError):
            broken = Failure("host_error", "the submission broke the recording: its answer is not a recording")
            return Recording(failure=broken, sandbox=outcome.ended.sandbox)
        failure = recording.failure
        if failure and failure.kind not in CHILD_KINDS:
            failure = msgspec.structs.replace(failure, kind="host_error")
        if failure is None and len(recording.plans) != len(request.calls):
            failure = Failure("host_error", "the submission broke the recording: it does not hold a plan per call")
        return msgspec.structs.replace(recording, failure=failure, sandbox=outcome.ended.sandbox)


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
