"""Run a recorded plan on a device and say what it is worth.

Trusted code: it holds the seeds, the inputs, the expected values and the clock. The candidate is only device code, run
on buffers that are made here.
"""

from __future__ import annotations

import re
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import msgspec
import torch

from mkb_env.devices.base import BoundPlan, Device, DeviceFault, LoadedPlan, short_name
from mkb_env.judge import diff, draws, roofline, structure, timing, tolerance
from mkb_env.judge.eager import eager_us
from mkb_env.judge.guard import plan_at_fault
from mkb_env.judge.statistics import certain
from mkb_env.judge.verdict import Evaluation, OutputDiff, Stage, Timing, clip
from mkb_env.plan import LaunchPlan
from mkb_env.problems.contract import Problem, Shape

Progress = Callable[[str, int, int], None]
"""Called with (stage, step, steps): ``("check", 2, 5)``."""


class EvaluateOptions(msgspec.Struct, frozen=True):
    """How thoroughly to judge."""

    correctness_draws: int = 5
    timing: bool = True
    min_draws: int = 50
    """Timed draws before the interval of the ratio is first looked at."""
    max_draws: int = 400
    warmup: int = 2
    """Timed draws that do not count; the correctness draws have run both sides already."""
    ratio_tolerance: float = 0.01
    """The 95 % interval of the speedup is to lie within this share of it, on either side."""
    timing_seconds: float = 10.0
    """No timed draw begins later than this, whatever the interval."""
    full_check_share: float = 0.05
    """Share of the timed draws, picked at random, that are held against the fp64 anchor like a correctness draw."""


class _Ended(Exception):
    """Judging is over before its end."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage, self.message = stage, message


def evaluate(
    problem: Problem,
    shape: Shape,
    plan: LaunchPlan,
    device: Device,
    options: EvaluateOptions | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Judge a validated plan: correctness on secret draws, then timing (measured on a GPU, estimated on the simulator).

    Faults of the device code, wrong results and a full device memory come back as the evaluation's stage; whatever was
    learned before stays in it.
    """
    judge = _Judge(problem, shape, plan, device, options or EvaluateOptions(), progress or (lambda *_: None))
    try:
        stage, message = judge.run()
    except _Ended as end:
        stage, message = end.stage, end.message
    except DeviceFault as fault:
        where = f"{judge.place}: " if judge.place else ""
        stage, message = Stage(fault.stage), f"{where}{_named(fault.message, problem, plan)}"
    except torch.OutOfMemoryError as error:
        stage, message = Stage.INFRA_ERROR, _memory_message(problem, shape, device, judge.place, error)
    except draws.ProblemError as error:
        stage, message = Stage.INFRA_ERROR, str(error)
    finally:
        judge.close()
    return judge.evaluation(stage, message)


def _named(message: str, problem: Problem, plan: LaunchPlan) -> str:
    """A device's message with the problem's names of the buffers, and without the tail of long kernel names."""

    def name(found: re.Match[str]) -> str:
        kind, number = found[1], int(found[2])
        names = {"input": problem.inputs, "output": problem.outputs}.get(kind, ())
        known = f"{kind} {number} ({names[number]})" if number < len(names) else f"{kind} {number}"
        return f"{'a workspace' if kind == 'workspace' else known} of {found[3]} bytes"

    for kernel in sorted({launch.kernel for launch in plan.launches}, key=len, reverse=True):
        message = message.replace(kernel, short_name(kernel))
    return re.sub(r"\b(input|output|workspace) (\d+) of (\d+) bytes", name, message)


def _memory_message(problem: Problem, shape: Shape, device: Device, place: str, error: Exception) -> str:
    has = "unknown"
    if device.torch_device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch_device)
        has = f"{total / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are free"
    reason = str(error).split(". ")[0]
    return (
        f"{problem.slug} with {shape} does not fit into the memory of {device.name} ({place or 'drawing inputs'}): "
        f"{reason}; the device has {has}. Use a smaller workload or a larger device."
    )


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(draws.raw(left), draws.raw(right))


class _Judge:
    def __init__(
        self,
        problem: Problem,
        shape: Shape,
        plan: LaunchPlan,
        device: Device,
        options: EvaluateOptions,
        progress: Progress,
    ) -> None:
        self.problem, self.shape, self.plan, self.device = problem, shape, plan, device
        self.options, self.progress = options, progress
        self.loaded: LoadedPlan | None = None
        self.seeds: list[int] = []
        self.seconds: dict[str, float] = {}
        self.diffs: dict[int, tuple[tuple[bool, float], OutputDiff]] = {}
        self.comparisons: list[list[tolerance.Comparison]] = [[] for _ in problem.outputs]
        self.dtypes: list[torch.dtype] = []
        self.timing: Timing | None = None
        self.steady = True
        """Whether a second run on the same inputs was right again."""
        self.place = ""
        """What was going on, for the message of a fault."""

    def run(self) -> tuple[Stage, str]:
        complaint = structure.wrong(self.plan, self.problem, self.shape)
        if complaint := complaint or structure.aliases(self.plan, self.device.torch_device):
            return Stage.INCORRECT, complaint
        self.seeds = list(draws.new_seeds(self.options.correctness_draws))
        with self._clock("load"), plan_at_fault():
            self.loaded = self.device.load(self.plan)
        failed = 0
        for number, seed in enumerate(self.seeds, 1):
            self.place = f"correctness draw {number} of {len(self.seeds)}"
            self.progress("check", number, len(self.seeds))
            failed += not self._check_draw(seed, repeat=number == len(self.seeds))
            if failed and self.device.simulated:
                break
        if failed:
            checked = f"{failed} of {number} draws"
            if not self.steady:
                checked += " (its second run on the same inputs: a race, or memory that was read before it was written)"
            return Stage.INCORRECT, diff.describe(self.problem, self._sorted_diffs(), checked)
        if self.options.timing:
            with self._clock("timing"):
                self.timing = self._estimate() if self.device.simulated else self._measure(self.loaded)
        self.place = ""
        return Stage.PASSED, self._summary()

    def evaluation(self, stage: Stage, message: str) -> Evaluation:
        return Evaluation(
            stage=stage,
            message=clip(message),
            diffs=self._sorted_diffs(),
            timing=self.timing if stage is Stage.PASSED else None,
            kernels=self.loaded.kernels if self.loaded else (),
            seconds={name: round(value, 6) for name, value in self.seconds.items()},
            seeds_sha256=draws.seeds_sha256(self.seeds) if self.seeds else "",
            device=self.device.name,
            simulated=self.device.simulated,
            versions={"torch": str(torch.__version__), **getattr(self.device, "versions", dict)()},
        )

    def close(self) -> None:
        """Unload the plan; a fault of the device has been reported already."""
        if self.loaded is not None:
            with suppress(DeviceFault):
                self.loaded.close()

    def _sorted_diffs(self) -> tuple[OutputDiff, ...]:
        return tuple(self.diffs[position][1] for position in sorted(self.diffs))

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    # Correctness

    def _check_draw(self, seed: int, repeat: bool) -> bool:
        """Run one draw, then compute what was to come out, then compare. Whether every output passed.

        With ``repeat`` the plan runs twice on the same inputs: races and memory that was never written show in bits.
        """
        assert self.loaded is not None
        with self._clock("draw"):
            given = draws.draw(self.problem, self.shape, seed, self.device.torch_device)
            if complaint := structure.misfit(self.plan, self.problem, given):
                raise _Ended(Stage.LAUNCH_ERROR, complaint)
        with self._clock("check"), plan_at_fault():
            bound = self.loaded.bind(given)
            answers = [self._answer(bound) for _ in range(2 if repeat else 1)]
        with self._clock("draw"):
            again = draws.draw(self.problem, self.shape, seed, self.device.torch_device)
            self._refuse_changed_inputs(seed, given, again)
        with self._clock("reference"):
            reference = draws.expected(self.problem, self.shape, again)
            self.dtypes = [tensor.dtype for tensor in draws.decoded(self.problem, reference)]
        passed = self._compare(again, answers[0], reference, learn=True)
        if not repeat or not passed or all(map(_same_bits, *answers)):
            return passed
        self.steady = self._compare(again, answers[1], reference, learn=False)
        return self.steady

    def _answer(self, bound: BoundPlan) -> tuple[torch.Tensor, ...]:
        """Outputs of one run, kept where no later run can reach them."""
        bound.poison()
        bound.run()
        self.device.synchronize()
        return tuple(output.clone(memory_format=torch.contiguous_format) for output in bound.outputs)

    def _refuse_changed_inputs(self, seed: int, given: Sequence[draws.Value], again: Sequence[draws.Value]) -> None:
        flags = draws.changed(given, again, self.device.torch_device).tolist()
        if any(flags):
            self._end_changed_inputs(seed, flags, again)

    def _end_changed_inputs(self, seed: int, flags: list[bool], again: Sequence[draws.Value]) -> NoReturn:
        third = draws.draw(self.problem, self.shape, seed, self.device.torch_device)
        if draws.changed(again, third, self.device.torch_device).any():
            raise draws.ProblemError(f"{self.problem.slug}: make_inputs gives different inputs for the same seed")
        names = ", ".join(f"`{name}`" for name, flag in zip(self.problem.inputs, flags, strict=True) if flag)
        raise _Ended(Stage.INCORRECT, f"{self.place}: the kernels wrote to their input {names}; inputs are read-only")

    def _compare(
        self,
        inputs: Sequence[draws.Value],
        outputs: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
        learn: bool,
    ) -> bool:
        with self._clock("reference"):
            truth = draws.decoded(self.problem, draws.anchors(self.problem, inputs, reference))
        with self._clock("check"):
            passed = True
            numbers = (draws.decoded(self.problem, values) for values in (outputs, reference))
            for position, (got, want, exact) in enumerate(zip(*numbers, truth, strict=True)):
                found = tolerance.compare(self.problem, position, got, want, exact, inputs)
                if learn:
                    self.comparisons[position].append(found)
                passed &= found.passed
                badness = (not found.passed, found.share)
                if position not in self.diffs or badness > self.diffs[position][0]:
                    values = diff.Values(outputs[position], got, want, exact, inputs)
                    self.diffs[position] = badness, diff.build(self.problem, position, found, values)
            return passed

    # Timing

    def _estimate(self) -> Timing:
        """The simulator's estimate of the kernel against a model of eager execution."""
        assert self.loaded is not None
        inputs = draws.draw(self.problem, self.shape, self.seeds[0], self.device.torch_device)
        with plan_at_fault():
            kernel_us = self.loaded.estimate_us()
        baseline_us = eager_us(self.problem, inputs)
        if not kernel_us:
            raise _Ended(Stage.INFRA_ERROR, f"{self.device.name} gave no estimate of the kernel's duration")
        return Timing(
            kernel_us=kernel_us,
            baseline_us=baseline_us,
            speedup=certain(baseline_us / kernel_us),
            device_speedup=None,
            draws=0,
            simulated=True,
            device=self.device.name,
            **self._roofline(kernel_us, roofline.H200),
        )

    def _measure(self, loaded: LoadedPlan) -> Timing:
        options = self.options
        bench = timing.Bench(self.problem, self.shape, self.device, loaded, timing.Stopwatch(self.device))
        rules = [
            tolerance.QuickRule.learn(found, dtype) for found, dtype in zip(self.comparisons, self.dtypes, strict=True)
        ]

        def progress(done: int) -> None:
            self.place = f"timed draw {done + 1}"
            self.progress("timing", done, options.max_draws)

        def check(done: timing.Answer, again: Sequence[draws.Value], reference: Sequence[torch.Tensor]) -> None:
            self._check_timed(rules, done, again, reference)

        self.place = "timing"
        samples, ratio, seeds = timing.end_to_end(
            bench,
            check,
            warmup=options.warmup,
            min_draws=options.min_draws,
            max_draws=options.max_draws,
            tolerance=options.ratio_tolerance,
            seconds=options.timing_seconds,
            progress=progress,
        )
        self.seeds += seeds
        self.place = "timing inside CUDA graphs"
        kernel_us = statistics.median(samples.kernel)
        return Timing(
            kernel_us=kernel_us,
            baseline_us=statistics.median(samples.baseline),
            speedup=ratio,
            device_speedup=timing.device_only(bench),
            draws=len(samples.kernel),
            simulated=False,
            device=self.device.name,
            **self._roofline(kernel_us, roofline.ceilings_of(self.device.name)),
        )

    def _roofline(self, kernel_us: float, ceilings: roofline.Ceilings) -> dict[str, Any]:
        cost = self.problem.cost(self.shape)
        return {
            "bound_us": roofline.bound_us(cost, ceilings),
            "roofline": roofline.score(cost, kernel_us, ceilings),
            "impossible": not self.device.simulated and roofline.is_impossible(cost, kernel_us),
        }

    def _check_timed(
        self,
        rules: Sequence[tolerance.QuickRule],
        done: timing.Answer,
        again: Sequence[draws.Value],
        reference: Sequence[torch.Tensor],
    ) -> None:
        """End the timing if a timed answer is wrong. The quick rule only sifts: what it drops is compared in full."""
        flags = draws.changed(done.given, again, self.device.torch_device)
        numbers = (draws.decoded(self.problem, values) for values in (done.outputs, reference))
        holds = torch.stack(
            [
                rule.holds(self.problem, position, got, want, again)
                for position, (rule, got, want) in enumerate(zip(rules, *numbers, strict=True))
            ]
        )
        *inputs_changed, all_hold = torch.cat([flags, holds.all().unsqueeze(0)]).tolist()
        if any(inputs_changed):
            self._end_changed_inputs(done.seed, inputs_changed, again)
        if all_hold and secrets.randbelow(1 << 20) >= self.options.full_check_share * (1 << 20):
            return
        if not self._compare(again, done.outputs, reference, learn=False):
            raise _Ended(
                Stage.INCORRECT,
                diff.describe(self.problem, self._sorted_diffs(), "a timed draw, after all correctness draws passed"),
            )

    def _summary(self) -> str:
        text = f"correct in {self.options.correctness_draws} draws"
        if self.timing is None:
            return text
        kind = "estimated" if self.timing.simulated else "measured"
        speedup = self.timing.speedup
        spread = "" if self.timing.simulated else f" (95 % interval {speedup.low:.3g} to {speedup.high:.3g})"
        return (
            f"{text}; {kind} on {self.device.name}: {self.timing.kernel_us:.1f} us against "
            f"{self.timing.baseline_us:.1f} us in eager PyTorch, speedup {speedup.value:.3g}{spread}"
        )
