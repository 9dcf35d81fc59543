"""The timing loop, with the simulator in the GPU's place and a wall clock in that of CUDA events."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import toy

from mkb_env.devices.simulator import SimulatorDevice
from mkb_env.judge import draws, evaluate, timing
from mkb_env.judge.evaluate import EvaluateOptions
from mkb_env.judge.spread import compare_with_itself, summarise
from mkb_env.judge.verdict import Interval, Stage


class WallClock:
    """A stopwatch that notes what it timed."""

    def __init__(self) -> None:
        self.timed: list[str] = []

    def idle(self, work: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.perf_counter()
        result = work()
        self.timed.append("candidate" if result is None else "baseline")
        return (time.perf_counter() - begin) * 1e6, result


@pytest.fixture(scope="module")
def device() -> SimulatorDevice:
    return SimulatorDevice()


def run(device: SimulatorDevice, check: Callable[..., None], **options: Any) -> tuple[Any, WallClock]:
    clock = WallClock()
    bench = timing.Bench(toy.problem(), toy.SHAPE, device, device.load(toy.plan()), clock)  # type: ignore[arg-type]
    settings = {"warmup": 2, "min_draws": 6, "max_draws": 9, "tolerance": 1e-9, "seconds": 60.0, **options}
    return timing.end_to_end(bench, check, progress=lambda done: None, **settings), clock


def test_every_answer_is_checked_once_against_inputs_drawn_anew(device: SimulatorDevice) -> None:
    checked: list[int] = []

    def check(done: timing.Answer, again: Sequence[draws.Value], reference: Sequence[torch.Tensor]) -> None:
        assert not draws.changed(done.given, again, device.torch_device).any()
        assert done.given[0].data_ptr() != again[0].data_ptr()  # type: ignore[union-attr]
        assert torch.allclose(done.outputs[0], reference[0])
        checked.append(done.seed)

    (samples, interval, seeds), clock = run(device, check)
    assert checked == seeds and len(set(seeds)) == 9 + 2 + 1
    assert len(samples.kernel) == len(samples.baseline) == 9
    assert interval.low <= interval.value <= interval.high
    assert clock.timed.count("candidate") == clock.timed.count("baseline") == len(seeds)
    # The reference for a draw runs only after the candidate has answered it.
    for place in range(len(clock.timed)):
        done = clock.timed[: place + 1]
        assert done.count("baseline") <= done.count("candidate") <= done.count("baseline") + 2


def test_the_order_within_a_slot_is_random(device: SimulatorDevice) -> None:
    orders = {tuple(run(device, lambda *_: None)[1].timed) for _ in range(4)}
    assert len(orders) > 1


def test_time_and_draws_are_bounded(device: SimulatorDevice) -> None:
    (samples, _, _), _ = run(device, lambda *_: None, seconds=0.0)
    assert len(samples.kernel) == 2
    (samples, _, _), _ = run(device, lambda *_: None, tolerance=1e9)
    assert len(samples.kernel) == 6


def test_a_wrong_timed_answer_ends_as_incorrect(device: SimulatorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    # The device's clock apart, this is the judge as it runs on a GPU.
    monkeypatch.setattr(timing, "Stopwatch", lambda device: WallClock())
    monkeypatch.setattr(timing, "device_only", lambda bench: None)
    monkeypatch.setattr(device, "simulated", False)
    options = evaluate.EvaluateOptions(min_draws=4, max_draws=4, warmup=1)
    right = evaluate.evaluate(toy.problem(), toy.SHAPE, toy.plan(), device, options)
    assert right.stage is Stage.PASSED and right.timing is not None and right.timing.draws == 4, right.message
    late = evaluate.evaluate(toy.problem(), toy.SHAPE, toy.plan(toy.DRIFT.format(calls=7)), device, options)
    assert late.stage is Stage.INCORRECT and "a timed draw" in late.message, late.message
    assert [diff.passed for diff in late.diffs] == [False] and late.kernels


def test_a_plan_may_be_timed_against_itself(device: SimulatorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Stopwatch", lambda device: WallClock())
    done: list[int] = []
    options = EvaluateOptions(min_draws=8, max_draws=8)
    found = compare_with_itself(toy.problem(), toy.SHAPE, toy.plan(), device, 3, done.append, options)
    assert found.comparisons == 3 and done == [1, 2, 3]
    assert found.kernel_us > 0 and 0 <= found.covered <= 1 and found.half_width > 0


def test_the_spread_of_comparisons() -> None:
    found = summarise(
        [Interval(1.0, 0.99, 1.01), Interval(1.02, 1.01, 1.03), Interval(0.97, 0.9, 1.04)], [3.0, 1.0, 2.0]
    )
    assert (found.comparisons, found.kernel_us) == (3, 2.0)
    assert found.covered == pytest.approx(2 / 3) and found.half_width == pytest.approx(0.01)
    assert found.largest_error == pytest.approx(0.03)
