"""The judge on a real GPU: timing, draws, faults in the timed part."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mkb_env.devices.cuda import CudaDevice, available
from mkb_env.judge.evaluate import EvaluateOptions, evaluate
from mkb_env.judge.verdict import Evaluation, Stage

sys.path.append(str(Path(__file__).parents[1] / "judge"))
import toy  # shared with the judge's own tests

pytestmark = pytest.mark.gpu
SHAPE = {"rows": 100_000}
FAST = {"min_draws": 20, "max_draws": 40, "warmup": 3}


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    if reason := available():
        pytest.skip(reason)
    yield CudaDevice()


def judge(device: CudaDevice, body: str = toy.RIGHT, problem: Any = None, **options: Any) -> Evaluation:
    plan = toy.plan(body, rows=SHAPE["rows"])
    return evaluate(problem or toy.problem(), SHAPE, plan, device, EvaluateOptions(**{**FAST, **options}))


def test_a_correct_kernel_is_measured(device: CudaDevice) -> None:
    result = judge(device)
    assert result.stage is Stage.PASSED, result.message
    timing = result.timing
    assert timing is not None and not timing.simulated and timing.draws >= 20
    assert timing.speedup.low <= timing.speedup.value <= timing.speedup.high
    # 51 MB moved: at least 10 us on any device, by the toy kernel (one element a thread) as by two eager ones.
    assert timing.kernel_us > 10 and timing.baseline_us > 10
    assert timing.speedup.value == pytest.approx(timing.baseline_us / timing.kernel_us)
    assert timing.device_speedup is not None and 0.1 < timing.device_speedup.value < 10
    assert result.seconds["timing"] < 5


def test_memory_does_not_grow(device: CudaDevice) -> None:
    judge(device)
    before = torch.cuda.memory_allocated()
    judge(device)
    assert torch.cuda.memory_allocated() <= before


def test_a_kernel_that_turns_wrong_in_the_timed_part_is_found(device: CudaDevice) -> None:
    result = judge(device, toy.DRIFT.format(calls=15))
    assert result.stage is Stage.INCORRECT and "timed draw" in result.message, result.message
    assert result.diffs and not result.diffs[0].passed


def test_a_reference_that_waits_for_the_host_has_no_device_speedup(device: CudaDevice) -> None:
    def reference(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return 2 * x + bias + 0 * float(bias[0].item())

    result = judge(device, problem=toy.problem(reference=reference))
    assert result.stage is Stage.PASSED and result.timing is not None
    assert result.timing.device_speedup is None
    assert judge(device).stage is Stage.PASSED, "the device is as good as before"


def test_too_large_a_workload_is_our_fault(device: CudaDevice) -> None:
    huge = toy.problem(make_inputs=lambda generator, shape: toy.make_inputs(generator, {"rows": 1 << 33}))
    result = judge(device, problem=huge)
    assert result.stage is Stage.INFRA_ERROR and "GiB" in result.message, result.message
