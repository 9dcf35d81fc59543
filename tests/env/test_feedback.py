"""A verdict as text."""

from __future__ import annotations

from mkb_env.devices.base import KernelInfo
from mkb_env.feedback import render
from mkb_env.judge.verdict import Interval, OutputDiff, Stage, Timing, Verdict
from mkb_env.recorder.protocol import SourceLocation


def verdict(**fields: object) -> Verdict:
    return Verdict(
        **{"stage": Stage.INCORRECT, "problem": "p", "dsl": "cute", "workload": "small", "message": "m", **fields}
    )


def test_place_in_the_source_has_a_caret_unless_the_message_shows_it() -> None:
    location = SourceLocation(3, 5, "    return T.nope(x)")
    shown = render(verdict(stage=Stage.COMPILE_ERROR, location=location, hint="look it up")).splitlines()
    assert shown == [
        "compile_error: m",
        "hint: look it up",
        "line 3 of the source:",
        "        return T.nope(x)",
        "        ^",
    ]
    message = "no such name\n 3 | return T.nope(x)"
    assert render(verdict(message=message, location=location)) == f"incorrect: {message}"


def test_diffs() -> None:
    wrong = OutputDiff("output[1]", (4, 8), "bfloat16", False, 0.5, 0.01, (2, 3), 1.5, 1.0, 0.25, 3, 1, "the last row")
    right = OutputDiff("output[0]", (4,), "float32", True, 1e-7, 1e-6)
    text = render(verdict(diffs=(right, wrong)))
    assert "output[0] float32[4]: right (max |error| 1e-07, allowed 1e-06)" in text
    assert "output[1] bfloat16[4, 8]: wrong (max |error| 0.5, allowed 0.01), 25 % of its elements outside" in text
    assert "worst at [2, 3]: got 1.5, want 1; 3 NaN, 1 Inf; the last row" in text
    assert "output[1] bfloat16" not in render(verdict(diffs=(right, wrong), message="output[1] is wrong"))


def test_timing_kernels_and_log() -> None:
    interval = Interval(2.0, 1.9, 2.1)
    timing = Timing(10.0, 20.0, interval, interval, 60, False, "NVIDIA H200")
    kernels = tuple(KernelInfo(f"k{n}" * 40, (n + 1, 1, 1), (32, 1, 1), (2, 1, 1), 64, 40, 8) for n in range(10))
    text = render(verdict(stage=Stage.PASSED, timing=timing, kernels=kernels, log="hello\n"))
    assert "speed-up 2.000, 95 % interval 1.900 to 2.100 (60 draws); on the device alone 2.000" in text
    assert "grid [1, 1, 1], block [32, 1, 1], cluster [2, 1, 1], 64 B shared, 40 registers, 8 B spilled" in text
    assert "and 2 more kernel launches" in text
    assert text.endswith("printed by the submission:\nhello")
    assert max(map(len, text.splitlines())) < 200
