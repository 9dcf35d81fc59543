"""The judge: source in, verdict out. Light to import: torch, problems and DSLs live in the servers it talks to.

The order of trust: the static rules read the source here; the recorder, confined, turns it into a plan; the plan is
validated here as untrusted data; an evaluator, which never sees the source, runs the plan and compares.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mkb_env import dsl as dsls
from mkb_env.judge.jobs import (
    Described,
    DescribeJob,
    DeviceJob,
    EvaluateJob,
    Facts,
    FactsJob,
    Job,
    MeasureJob,
    Spread,
    SpreadJob,
)
from mkb_env.judge.roofline import Ceilings
from mkb_env.judge.verdict import Evaluation, Stage, Verdict, clip
from mkb_env.judge.workers import Workers, check_device, hire
from mkb_env.legality import check
from mkb_env.plan import LaunchPlan, PlanError, decode, encode
from mkb_env.problems import find
from mkb_env.recorder.protocol import Call, Failure, Limits, Recording, RecordRequest
from mkb_env.servers.client import Outcome, ServerError, signal_name
from mkb_env.task import brief

EVALUATE_SECONDS = {"simulator": 240.0, "cuda": 60.0}
"""Wall clock of one evaluation, drawing and reference included, after which it is killed."""
SIMULATOR_MEMORY_BYTES = 16 << 30
T = TypeVar("T")


class RecordingError(RuntimeError):
    """A submission that gave no plan; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class Asked:
    """How one submission is to be judged."""

    timing: bool = True
    draws: int = 5
    priority: int = 0
    on_progress: Callable[[str], None] | None = None


class Judge:
    """Judges submissions on one device.

    Args:
        device: ``"simulator"``, ``"cuda"``, ``"cuda:N"``; ``"auto"``: the first GPU if there is one, else the
            simulator; or ``"ray"``: recorders and GPUs of a Ray cluster, or its simulators if it has no GPU
            (:mod:`mkb_env.devices.ray`; ``"ray:cuda"`` and ``"ray:simulator"`` choose).
        limits: bounds on recording one submission.

    Raises:
        ValueError: if ``device`` is none of these, or Ray is not installed.
    """

    def __init__(self, device: str = "auto", limits: Limits | None = None) -> None:
        check_device(device)
        self.device = device
        self.limits = limits or Limits()
        self._workers: Workers | None = None
        self._described: dict[tuple[str, str], list[Described]] = {}
        self._device_name = ""

    # -- the device -----------------------------------------------------------------------------------------------

    @property
    def simulated(self) -> bool:
        """Whether verdicts come from the simulator. Raises ServerError if a cluster cannot be reached."""
        return self.workers.device == "simulator"

    @property
    def default_workload(self) -> str:
        """``small`` on the simulator, ``full`` on a GPU."""
        return "small" if self.simulated else "full"

    @property
    def device_name(self) -> str:
        """The device's own name. Starts its server; raises ServerError if that fails."""
        if not self._device_name:
            self._device_name = self._ask(DeviceJob(), str)
        return self._device_name

    @property
    def workers(self) -> Workers:
        """Who records and evaluates. Raises ServerError if they are of a cluster that cannot be reached."""
        if self._workers is None:
            self._workers = hire(self.device)
            if self.device == "auto":
                self.device = self._workers.device
        return self._workers

    def _where(self) -> dict[str, Any]:
        """The verdict's device, by its own name once that is known; asking for it would start a server."""
        return {"device": self._device_name or self.workers.device, "simulated": self.simulated}

    def facts(self, problems: Sequence[str]) -> list[Facts]:
        """What is known of some problems at their full shapes. Raises ServerError if our side fails."""
        return self._ask(FactsJob(tuple(problems)), list[Facts])

    def measure(self) -> Ceilings:
        """What the device can do at the most, measured now. Raises ServerError; ValueError for the simulator."""
        if self.simulated:
            raise ValueError("only a GPU can be measured, and this is the simulator; give --device cuda")
        return self._ask(MeasureJob(), Ceilings)

    def spread(self, plan: LaunchPlan, comparisons: int) -> Spread:
        """A recorded plan timed against itself. Raises ServerError; ValueError for the simulator."""
        if self.simulated:
            raise ValueError("the simulator's times have no spread; give --device cuda")
        job = SpreadJob(plan.problem, plan.workload, plan.shape, encode(plan), comparisons)
        return self._ask(job, Spread, seconds=60.0 + 20.0 * comparisons)

    # -- verdicts -------------------------------------------------------------------------------------------------

    def judge(
        self,
        source: str,
        problem: str,
        dsl: str,
        workload: str | None = None,
        *,
        timing: bool = True,
        draws: int = 5,
        priority: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ) -> Verdict:
        """The verdict on a submission. Never raises for what the source does.

        Where servers are busy, jobs of the smallest ``priority`` go first.

        Raises:
            ValueError: if there is no such problem, DSL or workload.
        """
        started = time.monotonic()
        digest = hashlib.sha256(source.encode(errors="replace")).hexdigest()
        base = self._base(problem, dsl, workload, digest)
        if base.message:
            return base
        workload = base.workload
        failure = check(source, dsl, inputs=brief(problem).inputs)
        if failure:
            return _with_failure(base, Recording(failure=failure), started)
        try:
            shapes = self._judged_shapes(problem, workload)
            how = Asked(timing, draws, priority, on_progress)
            recording = self._record(source, dsl, list(shapes.values()), how)
            seconds = {**recording.seconds, "record": round(time.monotonic() - started, 4)}
            verdict = msgspec.structs.replace(base, log=recording.log)
            for shape, plan in zip(shapes, recording.plans, strict=False):  # fewer plans where recording failed
                verdict = self._judge_plan(base, recording, shape, plan, how)
                if workload == "heldout":
                    place = f"heldout shape {shape + 1}"
                    verdict = msgspec.structs.replace(verdict, message=f"{place}: {verdict.message}")
                if not verdict.passed:
                    break
            else:
                if recording.failure:
                    verdict = _with_failure(base, recording, started)
                    if workload == "heldout":
                        place = f"heldout shape {list(shapes)[len(recording.plans)] + 1}"
                        verdict = msgspec.structs.replace(verdict, message=f"{place}: {verdict.message}")
                elif workload == "heldout":
                    verdict = msgspec.structs.replace(verdict, message=f"all {len(shapes)} held-out shapes passed")
        except ServerError as error:
            return msgspec.structs.replace(base, message=str(error))
        seconds |= {**verdict.seconds, "total": round(time.monotonic() - started, 4)}
        return msgspec.structs.replace(verdict, seconds=seconds)

    def _judge_plan(
        self,
        base: Verdict,
        recording: Recording,
        shape: int,
        encoded: bytes,
        how: Asked,
    ) -> Verdict:
        try:
            plan = decode(encoded)
        except PlanError as error:
            return msgspec.structs.replace(
                base, stage=Stage.LAUNCH_ERROR, message=f"the launch plan is refused: {error}", log=recording.log
            )
        evaluation = self._evaluate(base, shape, encoded, how)
        return msgspec.structs.replace(_with_evaluation(base, evaluation, plan), log=recording.log)

    def replay(
        self,
        plan: LaunchPlan,
        problem: str,
        workload: str | None = None,
        *,
        timing: bool = True,
        draws: int = 5,
        shape: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ) -> Verdict:
        """The verdict on a recorded plan at one shape of a workload (``heldout`` has several).

        Raises:
            ValueError: if there is no such problem, workload or shape.
        """
        started = time.monotonic()
        base = self._base(problem, plan.dsl, workload, plan.source_sha256)
        if base.message:
            return base
        try:
            evaluation = self._evaluate(base, shape, encode(plan), Asked(timing, draws, 0, on_progress))
        except ServerError as error:
            return msgspec.structs.replace(base, message=str(error))
        verdict = _with_evaluation(base, evaluation, plan)
        seconds = {**evaluation.seconds, "total": round(time.monotonic() - started, 4)}
        return msgspec.structs.replace(verdict, seconds=seconds)

    def record(self, source: str, problem: str, dsl: str, workload: str | None = None, *, shape: int = 0) -> LaunchPlan:
        """The launch plan of a submission at one shape of a workload.

        Raises:
            ValueError: if there is no such problem, DSL, workload or shape.
            RecordingError: if the submission gives none.
            ServerError: if our side fails.
        """
        _check_names(problem, dsl, workload)
        workload = workload or self.default_workload
        failure = check(source, dsl, inputs=brief(problem).inputs)
        if failure:
            raise RecordingError(failure)
        calls = self._describe(problem, workload)
        if not 0 <= shape < len(calls):
            raise ValueError(f"workload {workload} of {problem} has shapes 0 to {len(calls) - 1}, got {shape}")
        recording = self._record(source, dsl, [calls[shape].call], Asked())
        if recording.failure:
            raise RecordingError(recording.failure)
        try:
            plan = decode(recording.plans[0])
        except PlanError as error:
            raise RecordingError(Failure("launch_error", f"the launch plan is refused: {error}")) from None
        return msgspec.structs.replace(plan, problem=problem, workload=workload, shape=shape)

    def close(self) -> None:
        """Forget the workers; servers end by themselves when nobody uses them (``mkb stop`` ends them now)."""
        self._workers = None

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _base(self, problem: str, dsl: str, workload: str | None, digest: str) -> Verdict:
        """The verdict before anything ran; with a message, it is final: there is nobody to do the work.

        Raises:
            ValueError: if there is no such problem, DSL or workload.
        """
        _check_names(problem, dsl, workload)
        base = Verdict(Stage.INFRA_ERROR, problem, dsl, workload or "", "", source_sha256=digest, device=self.device)
        try:
            workload = workload or self.default_workload
            return msgspec.structs.replace(base, workload=workload, **self._where())
        except ServerError as error:
            return msgspec.structs.replace(base, message=str(error))

    def _describe(self, problem: str, workload: str) -> list[Described]:
        key = problem, workload
        if key not in self._described:
            self._described[key] = self._ask(DescribeJob(problem, workload), list[Described])
        return self._described[key]

    def _judged_shapes(self, problem: str, workload: str) -> dict[int, Call]:
        """The shapes of a workload by index; of ``heldout``, in the simulator, those that it can do."""
        every = workload != "heldout" or not self.simulated
        described = enumerate(self._describe(problem, workload))
        return {index: found.call for index, found in described if every or found.fits_simulator}

    def _record(self, source: str, dsl: str, calls: list[Call], how: Asked) -> Recording:
        request = RecordRequest(source, dsl, tuple(calls), self.limits)
        return self.workers.recorder.record(request, how.on_progress, how.priority)

    def _ask(self, job: Job, kind: type[T], seconds: float = 120.0) -> T:
        outcome = self._run(job, Asked(), seconds)
        if outcome.result is None:
            raise ServerError(f"the evaluator gave no answer: {_ending(outcome)}")
        try:
            return msgspec.msgpack.decode(outcome.result, type=kind)
        except msgspec.ValidationError:
            evaluation = msgspec.msgpack.decode(outcome.result, type=Evaluation)
            raise ServerError(f"the evaluator failed: {evaluation.message}") from None

    def _run(self, job: Job, how: Asked, seconds: float) -> Outcome:
        return self.workers.evaluator.call(
            msgspec.msgpack.encode(job),
            seconds=seconds,
            memory_bytes=SIMULATOR_MEMORY_BYTES if self.simulated else 0,
            priority=how.priority,
            on_progress=how.on_progress,
        )

    def _evaluate(
        self,
        base: Verdict,
        shape: int,
        plan: bytes,
        how: Asked,
    ) -> Evaluation:
        seconds = EVALUATE_SECONDS[self.workers.device.partition(":")[0]]
        job = EvaluateJob(base.problem, base.workload, shape, plan, how.timing, how.draws)
        outcome = self._run(job, how, seconds)
        if outcome.result is not None:
            return msgspec.msgpack.decode(outcome.result, type=Evaluation)
        if (
            outcome.ended.timed_out
            and self.simulated
            and outcome.stage.startswith("check ")
            and outcome.stage[6] != "1"
        ):
            return Evaluation(
                Stage.UNSUPPORTED,
                f"the simulator is too slow for this shape: after {seconds:g} s it was at {outcome.stage}; judge it on "
                "a GPU, or at --workload small",
                **self._where(),
            )
        if outcome.ended.timed_out:
            where = f"in stage {outcome.stage or 'start'}"
            return Evaluation(
                Stage.TIMEOUT, f"the kernels were not done after {seconds:g} s ({where})", **self._where()
            )
        return Evaluation(Stage.INFRA_ERROR, f"the evaluator gave no answer: {_ending(outcome)}", **self._where())


def _check_names(problem: str, dsl: str, workload: str | None) -> None:
    find(problem)
    dsls.get(dsl)
    if workload not in (None, "full", "small", "heldout"):
        raise ValueError(f"workload must be full, small or heldout, got {workload!r}")


def _ending(outcome: Outcome) -> str:
    ended = outcome.ended
    if ended.timed_out:
        return "it ran out of time"
    how = f"it was ended by {signal_name(ended.signal)}" if ended.signal else f"it exited with {ended.exit_code}"
    return f"{how} {ended.detail}".strip() + (f" in stage {outcome.stage}" if outcome.stage else "")


def _with_failure(base: Verdict, recording: Recording, started: float) -> Verdict:
    failure = recording.failure
    assert failure is not None
    return msgspec.structs.replace(
        base,
        stage=Stage(failure.kind),
        message=clip(failure.message),
        hint=failure.hint,
        error_class=failure.error_class,
        location=failure.location,
        log=recording.log,
        seconds={**recording.seconds, "total": round(time.monotonic() - started, 4)},
    )


def _with_evaluation(base: Verdict, evaluation: Evaluation, plan: LaunchPlan) -> Verdict:
    same: dict[str, Any] = {
        name: getattr(evaluation, name)
        for name in ("stage", "message", "diffs", "timing", "kernels", "seconds", "seeds_sha256", "simulated")
    }
    same["device"] = evaluation.device or base.device  # a process that hung cannot tell its name
    versions = {**plan.toolchain, **evaluation.versions}
    return msgspec.structs.replace(base, **same, plan_sha256=plan.digest(), versions=versions)
