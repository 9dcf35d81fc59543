"""A/A comparisons: a kernel timed against itself, to see what the method makes of no difference at all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from mkb_env.devices.base import Device
from mkb_env.judge import timing
from mkb_env.judge.evaluate import EvaluateOptions
from mkb_env.judge.jobs import Spread
from mkb_env.judge.verdict import Interval
from mkb_env.plan import LaunchPlan
from mkb_env.problems.contract import Problem, Shape


def compare_with_itself(
    problem: Problem,
    shape: Shape,
    plan: LaunchPlan,
    device: Device,
    comparisons: int,
    progress: Callable[[int], None] = lambda done: None,
    options: EvaluateOptions | None = None,
) -> Spread:
    """``comparisons`` timings of a plan against itself, each as a verdict times a plan against the reference.

    Raises:
        DeviceFault: for faults of the device code.
    """
    options = options or EvaluateOptions()
    loaded = device.load(plan)
    found: list[Interval] = []
    times: list[float] = []
    try:
        bench = timing.Bench(problem, shape, device, loaded, timing.Stopwatch(device), itself=True)
        for number in range(comparisons):
            samples, ratio, _ = timing.end_to_end(
                bench,
                lambda *_: None,
                warmup=options.warmup,
                min_draws=options.min_draws,
                max_draws=options.max_draws,
                tolerance=options.ratio_tolerance,
                seconds=options.timing_seconds,
                progress=lambda done: None,
            )
            found.append(ratio)
            times += samples.kernel
            progress(number + 1)
    finally:
        loaded.close()
    return summarise(found, times)


def summarise(found: Sequence[Interval], times: Sequence[float]) -> Spread:
    """What the intervals of several A/A comparisons say of the method."""
    return Spread(
        comparisons=len(found),
        kernel_us=statistics.median(times),
        covered=sum(ratio.low <= 1.0 <= ratio.high for ratio in found) / len(found),
        half_width=statistics.median((ratio.high - ratio.low) / 2 for ratio in found),
        largest_error=max(abs(ratio.value - 1) for ratio in found),
    )
