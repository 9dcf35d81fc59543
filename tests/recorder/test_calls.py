"""One recording, several calls of ``solve``: caches live on, plans stay apart."""

from __future__ import annotations

import pytest
from sources import BY_DSL, INPUTS, OUTPUTS, with_solve

from mkb_env.plan import Fill, LaunchPlan, Upload, decode
from mkb_env.recorder.client import RecorderClient
from mkb_env.recorder.protocol import Call, OutputSpec, Recording, RecordRequest, TensorInput

TWICE = tuple(
    Call((TensorInput((rows, 128), "bfloat16"),), (OutputSpec((rows, 128), "bfloat16"),), False) for rows in (4, 7)
)
CACHED = """
    global y, table
    if "table" not in globals():
        table = torch.arange(128, dtype=torch.int32, device="cuda").view(1, 128)
        counter.fill_(1)
    y = torch.empty_like(x)
    launch(x, y)
    indices = torch.empty(1, 128, dtype=torch.int32, device="cuda")
    indices.copy_(table)
    return y
"""


def record(source: str, dsl: str, calls: tuple[Call, ...] = TWICE) -> Recording:
    return RecorderClient().record(RecordRequest(source, dsl, calls))


def plans_of(recording: Recording) -> list[LaunchPlan]:
    assert recording.failure is None, recording.failure
    return [decode(plan) for plan in recording.plans]


@pytest.mark.parametrize("dsl", ["cute", "tirx"])
def test_each_call_has_its_plan(dsl: str) -> None:
    first, second = plans_of(record(BY_DSL[dsl], dsl))
    assert (first.launches[0].grid[0], second.launches[0].grid[0]) == (4, 7)
    assert [[b.nbytes for b in plan.buffers] for plan in (first, second)] == [[1024, 1024], [1792, 1792]]


def test_what_is_cached_stays_usable_and_import_steps_lead_each_plan() -> None:
    source = with_solve("cute", CACHED, head='counter = torch.zeros(1, dtype=torch.int32, device="cuda")\n')
    first, second = plans_of(record(source, "cute"))
    for plan in (first, second):
        kinds = [type(step).__name__ for step in plan.steps]
        assert kinds.count("Upload") == 1 and kinds.count("Copy") == 1, kinds
    (upload,) = (step for step in second.steps if isinstance(step, Upload))
    assert upload.data == b"".join(number.to_bytes(4, "little") for number in range(128))
    assert [step.value for step in first.steps if isinstance(step, Fill)] == [0, 1]
    assert [step.value for step in second.steps if isinstance(step, Fill)] == [0]


def test_an_input_of_an_earlier_call_is_refused() -> None:
    body = """
    global kept
    if "kept" not in globals():
        kept = x
    y = torch.empty_like(x)
    launch(kept, y[:4])
    return y
"""
    recording = record(with_solve("cute", body), "cute")
    assert len(recording.plans) == 1 and recording.failure is not None
    assert recording.failure.kind == "host_error" and "input 0 of an earlier call" in recording.failure.message


def test_a_later_failure_keeps_earlier_plans() -> None:
    body = "    assert x.shape[0] == 4, 'only four rows'\n    y = torch.empty_like(x)\n    launch(x, y)\n    return y"
    recording = record(with_solve("cute", body), "cute")
    assert len(recording.plans) == 1 and recording.failure is not None
    assert "only four rows" in recording.failure.message


def test_one_call_is_as_before() -> None:
    (plan,) = plans_of(record(BY_DSL["cute"], "cute", (Call(INPUTS, OUTPUTS, False),)))
    assert plan.launches[0].grid[0] == 4
