"""How fast this machine judges: full verdicts of sources that nothing has seen before.

Two figures per DSL and problem. *Latency*: one submission at a time, from source to verdict. *Throughput*: as many at
a time as the pipeline takes, verdicts over the wall clock from the first submission to the last verdict. Every source
is made new by a comment, so it is compiled; the kernels are this package's own. On a GPU also the *spread*: the kernel
timed against itself, as a verdict times it against the reference.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from mkb_env.devices.utilisation import Utilisation
from mkb_env.judge.client import Judge
from mkb_env.judge.jobs import Spread
from mkb_env.judge.pipeline import Pipeline, Submission
from mkb_env.judge.verdict import Stage, Verdict
from mkb_env.problems import find

PROBLEMS = ("rmsnorm_h128_qwen3_30b_bf16", "fused_add_rmsnorm_h4096_llama31_8b_bf16")
COMPARISONS = 20
Tell = Callable[[str], None]


class Row(msgspec.Struct, frozen=True):
    """One DSL, problem and workload."""

    dsl: str
    problem: str
    workload: str
    latency_p50: float
    """Seconds, one submission at a time."""
    latency_p95: float
    latency_count: int
    verdicts_per_minute: float
    throughput_count: int
    seconds_by_stage: dict[str, float]
    """Median seconds of each stage, one submission at a time."""
    device_utilisation: float | None
    """Share of the throughput phase in which the GPU ran a kernel, by NVML; None in the simulator."""
    spread: Spread | None
    """A/A comparisons of the kernel with itself; None in the simulator."""
    not_passed: int
    """Verdicts other than ``passed``: with known-good kernels each is a fault of ours."""


class Report(msgspec.Struct, frozen=True):
    """What ``mkb bench judge`` prints."""

    device: str
    simulated: bool
    recorders: int
    seconds: float
    verdicts_per_minute: float
    """Over all throughput phases together."""
    rows: tuple[Row, ...]


def fresh(problem: str, dsl: str, workload: str) -> Iterator[Submission]:
    """Endless submissions of this package's kernel, no two alike."""
    path = find(problem).baseline(dsl)
    if path is None:
        raise ValueError(f"{problem} has no {dsl} kernel here; choose a problem that `mkb list` gives one")
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if "mkb-baseline-canary" not in line)
    text = "\n".join(lines)
    for number in itertools.count():
        yield Submission(f"{text}\n# {secrets.token_hex(8)} {number}\n", problem, dsl, workload)


def run(
    device: str, seconds: float, problems: Sequence[str], dsls: Sequence[str], recorders: int | None, tell: Tell
) -> Report:
    """Measure for about ``seconds`` in all, evenly shared by DSL, problem and figure.

    Raises:
        ValueError: if a problem has no kernel in one of the DSLs, or there is no such device.
    """
    judge = Judge(device)
    workload, cases = judge.default_workload, [(dsl, problem) for problem in problems for dsl in dsls]
    share = seconds / (2 * len(cases))
    rows, judged, spent = [], 0, 0.0
    with Pipeline([device], recorders=recorders, waiting=1) as pipeline:
        for dsl, problem in cases:
            tell(f"{problem}, {dsl}: latency")
            warm, *single = _one_by_one(judge, fresh(problem, dsl, workload), share)
            tell(f"{problem}, {dsl}: throughput")
            with Utilisation(None if judge.simulated or device.startswith("ray") else device) as busy:
                many, took = _side_by_side(pipeline, fresh(problem, dsl, workload), share)
            judged, spent = judged + len(many), spent + took
            row = _row((dsl, problem, workload), single or [warm], many, took, busy.share)
            rows.append(row if judge.simulated else msgspec.structs.replace(row, spread=_spread(judge, row)))
    return Report(
        device=judge.device_name,
        simulated=judge.simulated,
        recorders=pipeline.recorders,
        seconds=seconds,
        verdicts_per_minute=60 * judged / spent,
        rows=tuple(rows),
    )


def _one_by_one(judge: Judge, submissions: Iterator[Submission], seconds: float) -> list[Verdict]:
    """Verdicts until the time is over; the first, which warms up, is one too many."""
    verdicts: list[Verdict] = []
    end = 0.0
    for submission in submissions:
        verdicts.append(judge.judge(submission.source, submission.problem, submission.dsl, submission.workload))
        end = end or time.monotonic() + seconds
        if time.monotonic() >= end and len(verdicts) > 1:
            break
    return verdicts


def _side_by_side(pipeline: Pipeline, submissions: Iterator[Submission], seconds: float) -> tuple[list[Verdict], float]:
    """Verdicts of what was submitted until the time was over, and the seconds until the last."""
    begin = time.monotonic()
    timed = itertools.takewhile(lambda _: time.monotonic() < begin + seconds, submissions)
    verdicts = [verdict for _, verdict in pipeline.judge(timed)]
    return verdicts, time.monotonic() - begin


def _spread(judge: Judge, row: Row) -> Spread:
    submission = next(fresh(row.problem, row.dsl, row.workload))
    return judge.spread(judge.record(submission.source, row.problem, row.dsl, row.workload), COMPARISONS)


def _row(
    case: tuple[str, str, str], single: list[Verdict], many: list[Verdict], took: float, busy: float | None
) -> Row:
    totals = sorted(verdict.seconds["total"] for verdict in single)
    stages = sorted({stage for verdict in single for stage in verdict.seconds})
    return Row(
        *case,
        latency_p50=round(statistics.median(totals), 4),
        latency_p95=round(totals[min(len(totals) - 1, int(0.95 * len(totals)))], 4),
        latency_count=len(single),
        verdicts_per_minute=round(60 * len(many) / took, 1),
        throughput_count=len(many),
        seconds_by_stage={
            stage: round(statistics.median(v.seconds.get(stage, 0.0) for v in single), 4) for stage in stages
        },
        device_utilisation=busy,
        spread=None,
        not_passed=sum(verdict.stage is not Stage.PASSED for verdict in (*single, *many)),
    )
