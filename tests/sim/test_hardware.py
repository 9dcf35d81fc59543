"""The simulator against an H200: same plan, same inputs, outputs recorded there (see ``fixtures/README.md``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mkb_env.devices.simulator import SimulatorDevice
from mkb_env.plan import decode
from mkb_env.problems import load

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.npz"))
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_ULPS = 2


def ordinals(values: torch.Tensor) -> torch.Tensor:
    """Where values stand in the order of their format's numbers, as int64: neighbours differ by 1, both zeros are 0,
    the infinities follow the largest finite numbers. NaNs have no place.
    """
    bits = values.contiguous().view(INTEGERS[values.element_size()]).long()
    magnitude = bits & (1 << (8 * values.element_size() - 1)) - 1
    return torch.where(bits < 0, -magnitude, magnitude)


def ulps(got: torch.Tensor, want: torch.Tensor) -> int:
    """The largest distance in units in the last place; infinities, and NaNs, only match their like."""
    special = ~(got.isfinite() & want.isfinite())
    assert torch.equal(got.isnan(), want.isnan())
    infinite = special & ~got.isnan()
    assert torch.equal(got[infinite], want[infinite])
    return int((ordinals(got) - ordinals(want))[~special].abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_distance_counts_representable_numbers(dtype: torch.dtype) -> None:
    one, tiny = torch.ones(1, dtype=dtype), torch.finfo(dtype).smallest_normal
    eps = torch.finfo(dtype).eps
    assert ulps(one, one + eps) == 1 and ulps(one, one - eps / 2) == 1 and ulps(-one, -one - 3 * eps) == 3
    assert ulps(torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)) == 0
    small = torch.tensor([tiny * eps], dtype=dtype)
    assert ulps(small, -small) == 2
    endless = torch.tensor([-float("inf"), 1.0], dtype=dtype)
    assert ulps(endless, endless) == 0
    for other in (float("inf"), float("nan"), torch.finfo(dtype).min):
        with pytest.raises(AssertionError):
            ulps(endless, torch.tensor([other, 1.0], dtype=dtype))


def distances(path: Path) -> list[int]:
    """Of each output of a fixture's plan: how far the simulator is from the recorded device."""
    recorded = np.load(path)
    plan = decode(recorded["plan"].tobytes())
    problem = load(path.name.split(".")[0])
    inputs = problem.make_inputs(torch.Generator().manual_seed(1), problem.shapes("small")[0])
    bound = SimulatorDevice().load(plan).bind(inputs)
    bound.poison()
    bound.run()
    wants = [torch.from_numpy(recorded[f"output{i}"]) for i in range(len(bound.outputs))]
    return [ulps(got, want.view(got.dtype).view(got.shape)) for got, want in zip(bound.outputs, wants, strict=True)]


def test_there_is_a_recording_of_every_kernel() -> None:
    assert len(FIXTURES) == 6
    assert all("H200" in str(np.load(path)["device"]) for path in FIXTURES)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_simulator_agrees_with_an_h200(path: Path) -> None:
    found = distances(path)
    assert found and max(found) <= MOST_ULPS, found
