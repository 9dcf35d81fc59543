"""The verdict as a record: JSON and back, long messages."""

from __future__ import annotations

import json
import math

from mkb_env.judge.verdict import MAX_MESSAGE, Interval, OutputDiff, Stage, Timing, Verdict, clip


def test_json_round_trip_with_what_json_lacks() -> None:
    diff = OutputDiff("output[0]", (2, 3), "bfloat16", False, math.inf, 0.5, (1, 2), math.nan, -math.inf, 1.0, 6)
    timing = Timing(10.0, 20.0, Interval(2.0, 1.9, 2.1), None, 50, False, "NVIDIA H200")
    verdict = Verdict(Stage.INCORRECT, "slug", "cute", "small", "wrong", diffs=(diff,), timing=timing)
    text = verdict.to_json()

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    fields = json.loads(text, parse_constant=no_constant)
    assert fields["stage"] == "incorrect" and fields["diffs"][0]["max_abs_error"] == "inf"
    back = Verdict.from_json(text)
    assert back.diffs[0].max_abs_error == math.inf and back.diffs[0].want == -math.inf
    assert back.diffs[0].got is not None and math.isnan(back.diffs[0].got)
    assert (back.stage, back.timing) == (verdict.stage, verdict.timing)


def test_stages_that_are_not_the_agents_fault_cost_nothing() -> None:
    assert {stage for stage in Stage if not stage.costs_step} == {Stage.UNSUPPORTED, Stage.INFRA_ERROR}


def test_clip_keeps_head_and_tail() -> None:
    text = "a" * 5000 + "b" * 5000
    short = clip(text)
    assert len(short) <= MAX_MESSAGE and short.startswith("aaa") and short.endswith("bbb")
    assert clip("short") == "short"
