"""Timing of a loaded plan against the eager reference on a real GPU.

Each slot times the candidate on a new draw and the reference on the *previous* slot's, in random order. So the
reference's output for a draw comes into being only after the candidate has answered it, every timed reference run
doubles as the check of an answer, and no order of the two gives either a warmer cache or the other's results. Both are
bracketed by CUDA events on an idle stream after the persisting L2 lines were reset and the L2 cache was overwritten:
the time includes the launch by the host, as a caller would see it.
"""

from __future__ import annotations

import gc
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mkb_env.devices.base import Device, DeviceFault, LoadedPlan
from mkb_env.judge import draws
from mkb_env.judge.guard import plan_at_fault
from mkb_env.judge.statistics import is_narrow, ratio_of_medians
from mkb_env.judge.verdict import Interval
from mkb_env.problems.contract import Problem, Shape

FLUSH_FACTOR = 2.5
"""The flush overwrites this many times the L2 cache's size."""
GROWTH = 1.5
"""Draws are added until there are this many times as many, then the interval is computed again."""
GRAPH_REPLAYS = 12


@dataclass(frozen=True)
class Answer:
    """What the candidate returned for one draw, kept where it cannot reach it."""

    seed: int
    given: tuple[draws.Value, ...]
    """The inputs it was given, as it left them."""
    outputs: tuple[torch.Tensor, ...]


@dataclass
class Samples:
    """Times in microseconds, paired by slot."""

    kernel: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """Everything one timing needs."""

    problem: Problem
    shape: Shape
    device: Device
    loaded: LoadedPlan
    stopwatch: Stopwatch
    itself: bool = False
    """Whether the plan is timed against itself instead of the reference, to see what the method makes of no difference.
    """

    def baseline(self, inputs: Sequence[draws.Value]) -> Callable[[], Any]:
        """What is timed on the other side, ready to run; it returns the outputs."""
        if not self.itself:
            return lambda: self.problem.reference(*inputs)
        bound = self.loaded.bind(inputs)
        bound.poison()

        def run() -> tuple[torch.Tensor, ...]:
            bound.run()
            return bound.outputs

        return run


class Stopwatch:
    """Times work on the current stream of a CUDA device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        cache = torch.cuda.get_device_properties(device.torch_device).L2_cache_size
        self._flush = torch.empty(int(FLUSH_FACTOR * cache) // 8 + 1, dtype=torch.int64, device=device.torch_device)
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._reset: Callable[[], None] = getattr(device, "reset_persisting_l2", lambda: None)

    def cold(self) -> None:
        """Enqueue what leaves nothing of the inputs in L2."""
        self._reset()
        self._flush.fill_(secrets.randbits(60))

    def idle(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Microseconds of ``work`` from an idle stream, the host's launching included, and its result."""
        self.cold()
        self.device.synchronize()
        return self._bracket(work)

    def queued(self, work: Callable[[], Any]) -> float:
        """Microseconds of ``work`` on the device alone: it is enqueued while the flush before it still runs."""
        self.device.synchronize()
        self.cold()
        self.cold()
        return self._bracket(work)[0]

    def _bracket(self, work: Callable[[], Any]) -> tuple[float, Any]:
        start, end = self._events
        start.record()
        result = work()
        end.record()
        self.device.synchronize()
        return start.elapsed_time(end) * 1e3, result


def answer(bench: Bench, seed: int, run: Callable[[Callable[[], None]], Any]) -> tuple[Answer, Any]:
    """One run of the candidate on a new draw; ``run`` gets the function that runs it.

    Raises:
        DeviceFault: for faults of the device code.
    """
    given = draws.draw(bench.problem, bench.shape, seed, bench.device.torch_device)
    with plan_at_fault():
        bound = bench.loaded.bind(given)
        bound.poison()
        result = run(bound.run)
        outputs = tuple(output.clone(memory_format=torch.contiguous_format) for output in bound.outputs)
    return Answer(seed, given, outputs), result


def end_to_end(
    bench: Bench,
    check: Callable[[Answer, Sequence[draws.Value], Sequence[torch.Tensor]], None],
    *,
    warmup: int,
    min_draws: int,
    max_draws: int,
    tolerance: float,
    seconds: float,
    progress: Callable[[int], None],
) -> tuple[Samples, Interval, list[int]]:
    """Times of candidate and eager reference, the interval of their ratio, and the seeds used.

    ``check(answer, inputs, reference)`` is called once per draw, on inputs drawn anew, and raises to end the timing.
    Draws are added until the interval is within ``tolerance`` of the ratio, or until ``max_draws`` or ``seconds``.

    Raises:
        DeviceFault: for faults of the device code.
    """
    samples, seeds, deadline = Samples(), [], time.perf_counter() + seconds
    pending: Answer | None = None

    def candidate() -> tuple[Answer, float]:
        seeds.append(draws.new_seeds(1)[0])
        fresh, timed = answer(bench, seeds[-1], bench.stopwatch.idle)
        return fresh, timed[0]

    def baseline(done: Answer) -> float:
        again = draws.draw(bench.problem, bench.shape, done.seed, bench.device.torch_device)
        microseconds, result = bench.stopwatch.idle(bench.baseline(again))
        check(done, again, draws.leaves(result))
        return microseconds

    with draws.strict_math(), torch.no_grad(), _no_collection():
        target, slots = min_draws, 0
        while True:
            first = secrets.randbits(1)
            baseline_us = baseline(pending) if pending and first else None
            fresh, kernel_us = candidate()
            if pending and not first:
                baseline_us = baseline(pending)
            pending, slots = fresh, slots + 1
            if baseline_us is None or slots <= warmup + 1:
                continue
            samples.kernel.append(kernel_us)
            samples.baseline.append(baseline_us)
            count = len(samples.kernel)
            progress(count)
            late = time.perf_counter() > deadline and count >= 2
            if count >= target or late:
                interval = ratio_of_medians(samples.baseline, samples.kernel)
                if is_narrow(interval, tolerance) or count >= max_draws or late:
                    break
                target = min(max_draws, int(count * GROWTH))
        baseline(pending)
    return samples, interval, seeds


def device_only(bench: Bench) -> Interval | None:
    """Speedup with both sides inside CUDA graphs; None if one of them cannot be captured.

    Replays are enqueued behind the L2 flush, so that launching them costs nothing. Candidate and reference work on
    different draws.

    Raises:
        DeviceFault: for faults of the device code, other than a refusal to be captured.
    """
    first, second = (
        draws.draw(bench.problem, bench.shape, seed, bench.device.torch_device) for seed in draws.new_seeds(2)
    )
    with plan_at_fault():
        bound = bench.loaded.bind(first)
        bound.poison()
    graphs: list[torch.cuda.CUDAGraph] = []
    with draws.strict_math(), torch.no_grad(), _no_collection():
        try:
            if not _is_capturable(bench, second):
                return None
            for work in (lambda: bench.problem.reference(*second), bound.run):
                graph = _capture(bench.device, work)
                if graph is None:
                    return None
                graphs.append(graph)
            return _replay(bench.stopwatch, *graphs)
        finally:
            # The graphs hold the modules' functions: they go before the plan is closed.
            bench.device.synchronize()
            for graph in graphs:
                graph.reset()


def _replay(stopwatch: Stopwatch, baseline: torch.cuda.CUDAGraph, kernel: torch.cuda.CUDAGraph) -> Interval:
    samples, warmup = Samples(), 3
    pair = ((kernel, samples.kernel), (baseline, samples.baseline))
    for number in range(warmup + GRAPH_REPLAYS):
        for graph, times in pair if secrets.randbits(1) else reversed(pair):
            microseconds = stopwatch.queued(graph.replay)
            if number >= warmup:
                times.append(microseconds)
    return ratio_of_medians(samples.baseline, samples.kernel)


def _is_capturable(bench: Bench, inputs: Sequence[draws.Value]) -> bool:
    """Whether the reference neither waits for the device nor copies from the host.

    Asked of torch's synchronisation check before a capture is tried: a failed capture can leave the allocator in a
    capturing state.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # torch calls the mode a prototype each time; the capture is tried anyway
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        bench.problem.reference(*inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    bench.device.synchronize()
    return True


def _capture(device: Device, work: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
    """``work`` as a graph, or None where it cannot be captured.

    Not through ``torch.cuda.graph``, which empties the allocator's cache: the next draws would pay for it.
    """
    stream = torch.cuda.Stream(device.torch_device)
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        failure: Exception | None = None
        try:
            work()
        except (RuntimeError, DeviceFault) as error:
            failure = error
        try:
            graph.capture_end()
        except RuntimeError as error:
            failure = failure or error
    device.synchronize()
    return None if failure else graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection within the block: it would land in a timed section."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
