"""Bounds, scores and the floor; what was measured is kept beside what other devices have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toy

from mkb_env.devices.function import FunctionDevice
from mkb_env.judge import roofline
from mkb_env.judge.client import Judge
from mkb_env.judge.evaluate import EvaluateOptions, _Judge
from mkb_env.judge.roofline import H200, Ceilings
from mkb_env.problems.contract import Cost

MEMORY = Cost(bytes=480_000_000, flops=1_000_000, unit="fp32")
COMPUTE = Cost(bytes=1_000_000, flops=98_900_000_000, unit="bf16")


def test_the_bound_is_the_longer_of_two() -> None:
    assert roofline.bound_us(MEMORY) == pytest.approx(100.0)
    assert roofline.bound_us(COMPUTE) == pytest.approx(100.0)
    assert roofline.is_memory_bound(MEMORY) and not roofline.is_memory_bound(COMPUTE)


def test_scores_lie_between_0_and_1() -> None:
    assert roofline.score(MEMORY, 400.0, H200) == pytest.approx(0.25)
    assert roofline.score(MEMORY, 90.0, H200) == 1.0
    slower = Ceilings("another", 2.4e6, H200.flops_per_us)
    assert roofline.score(MEMORY, 400.0, slower) == pytest.approx(0.5)


def test_the_floor_goes_by_the_datasheet() -> None:
    assert roofline.is_impossible(MEMORY, 94.0) and not roofline.is_impossible(MEMORY, 96.0)


def test_measured_ceilings_are_kept_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKB_CONFIG_DIR", str(tmp_path / "new"))
    assert roofline.ceilings_of("one") == H200
    one, two = (Ceilings(name, speed, {"bf16": 1.0}) for name, speed in (("one", 1e6), ("two", 2e6)))
    roofline.keep(one)
    path = roofline.keep(two)
    assert path == tmp_path / "new" / "ceilings.json"
    assert (roofline.ceilings_of("one"), roofline.ceilings_of("two")) == (one, two)
    path.write_text("broken")
    assert roofline.ceilings_of("one") == H200
    roofline.keep(one)
    assert roofline.ceilings_of("one") == one


def test_a_timing_tells_bound_score_and_floor() -> None:
    device = FunctionDevice(toy.reference, torch.device("cpu"))
    judge = _Judge(toy.problem(), toy.SHAPE, toy.plan(), device, EvaluateOptions(), lambda *_: None)
    cost = toy.problem().cost(toy.SHAPE)
    told = judge._roofline(1.0, H200)
    assert told["bound_us"] == pytest.approx(roofline.bound_us(cost))
    assert told["roofline"] == pytest.approx(roofline.bound_us(cost)) and told["impossible"] is False
    assert judge._roofline(0.5 * roofline.bound_us(cost), H200) == {**told, "roofline": 1.0, "impossible": True}


def test_the_simulator_has_no_ceilings() -> None:
    with pytest.raises(ValueError, match="only a GPU can be measured"):
        Judge("simulator").measure()
