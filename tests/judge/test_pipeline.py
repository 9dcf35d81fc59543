"""Many submissions side by side: right verdicts, in order of completion, with back-pressure, priorities and retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mkb_env.judge.client import Judge
from mkb_env.judge.pipeline import BULK, EPISODE, Pipeline, Submission
from mkb_env.judge.verdict import Stage, Verdict

SLUG = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = Path(__file__).parents[2].joinpath("agents/demo/rmsnorm_cute.py").read_text()


def submission(source: str = GOOD) -> Submission:
    return Submission(source, SLUG, "cute", "small", timing=False, draws=1)


def test_right_verdicts_for_good_and_bad() -> None:
    sources = [GOOD, "def solve(x:", GOOD + "\n# fresh\n", "def solve(x, w):\n    return x\n"]
    with Pipeline(["simulator"]) as pipeline:
        verdicts = dict(pipeline.judge([submission(source) for source in sources]))
    stages = [verdicts[number].stage for number in range(4)]
    assert stages[0] is stages[2] is Stage.PASSED
    assert stages[1] is Stage.REJECTED and stages[3] not in (Stage.PASSED, Stage.INFRA_ERROR)


def test_a_bad_name_reaches_the_caller() -> None:
    with Pipeline(["simulator"]) as pipeline:
        future = pipeline.submit(Submission(GOOD, "no_such_problem", "cute"))
        with pytest.raises(ValueError, match="no problem is called"):
            future.result()
    with pytest.raises(ValueError, match="at least one device"):
        Pipeline([])


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces judging by a pause; what was judged, in order. A source ``fail N`` fails on our side N times."""
    log: list[str] = []

    def judge(self: Judge, source: str, problem: str, dsl: str, *_: Any, **how: Any) -> Verdict:
        log.append(f"{source} {self.device}")
        time.sleep(0.02)
        failing = source.startswith("fail") and sum(line.startswith(source) for line in log) <= int(source[5:])
        verdict = Verdict(Stage.INFRA_ERROR if failing else Stage.PASSED, problem, dsl, "small", source)
        return msgspec.structs.replace(verdict, device=self.device)

    monkeypatch.setattr(Judge, "judge", judge)
    return log


def test_no_more_is_taken_than_can_be_judged(judged: list[str]) -> None:
    taken: list[int] = []

    def endless() -> Iterator[Submission]:
        for number in range(100000):
            taken.append(number)
            yield submission(str(number))

    with Pipeline(["simulator"], recorders=1, waiting=2) as pipeline:
        results = pipeline.judge(endless())
        first = [next(results) for _ in range(4)]
        assert len(first) == 4 and len(taken) < 20
        results.close()  # type: ignore[attr-defined]


def test_an_episode_overtakes_a_bulk_run(judged: list[str]) -> None:
    with Pipeline(["simulator"], recorders=1) as pipeline:
        bulk = [pipeline.submit(submission(f"bulk {number}"), BULK) for number in range(12)]
        pipeline.submit(submission("episode"), EPISODE).result()
        assert not all(future.done() for future in bulk)
    assert all(future.done() for future in bulk)
    assert judged.index("episode simulator") < 9


def test_what_has_not_begun_can_be_cancelled(judged: list[str]) -> None:
    with Pipeline(["simulator"], recorders=1) as pipeline:
        futures = [pipeline.submit(submission(str(number))) for number in range(12)]
        assert futures[-1].cancel()
    assert "11 simulator" not in judged and len(judged) == 11


def test_an_exception_drops_what_waits(judged: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Pipeline(["simulator"], recorders=1) as pipeline:
        futures = [pipeline.submit(submission(str(number))) for number in range(40)]
        raise KeyboardInterrupt
    assert sum(future.cancelled() for future in futures) > 20
    assert all(future.done() for future in futures)


def test_failures_of_our_side_are_tried_again(judged: list[str]) -> None:
    with Pipeline(["simulator"], recorders=1) as pipeline:
        twice, ever = (pipeline.submit(submission(source)) for source in ("fail 2", "fail 9"))
        assert twice.result().stage is Stage.PASSED
        assert ever.result().stage is Stage.INFRA_ERROR
    assert judged.count("fail 2 simulator") == judged.count("fail 9 simulator") == 3


def test_every_device_works(judged: list[str]) -> None:
    with Pipeline(["cuda:0", "cuda:1"], recorders=4) as pipeline:
        verdicts = dict(pipeline.judge(submission(str(number)) for number in range(40)))
    share = sum(verdict.device == "cuda:1" for verdict in verdicts.values())
    assert len(verdicts) == 40 and 10 <= share <= 30


def test_threads_end_with_the_pipeline(judged: list[str]) -> None:
    before = threading.active_count()
    with Pipeline(["simulator"]) as pipeline:
        pipeline.submit(submission()).result()
    assert threading.active_count() == before
