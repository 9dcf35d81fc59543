"""A judge that answers from a table, for tests of an episode's bookkeeping only: nothing is compiled or run."""

from __future__ import annotations

from mkb_env.judge.verdict import Interval, Stage, Timing, Verdict


def verdict(stage: Stage, speedup: float = 0.0, workload: str = "small") -> Verdict:
    """A verdict of that stage, with that speed-up if it passed."""
    timing = None
    if stage is Stage.PASSED:
        timing = Timing(10.0, 10.0 * speedup, Interval(speedup, speedup, speedup), None, 50, True, "table")
    return Verdict(stage, "rmsnorm_h128_qwen3_30b_bf16", "cute", workload, f"this is {stage.value}", timing=timing)


class TableJudge:
    """``answers[source]`` is that source's verdicts in order; the last one repeats."""

    simulated = True
    device_name = "table"
    default_workload = "small"

    def __init__(self, answers: dict[str, list[Verdict]]) -> None:
        self.answers = {source: list(verdicts) for source, verdicts in answers.items()}
        self.calls: list[tuple[str, str | None, bool]] = []
        self.closed = False

    def judge(
        self, source: str, problem: str, dsl: str, workload: str | None = None, *, timing: bool = True, draws: int = 5
    ) -> Verdict:
        self.calls.append((source, workload, timing))
        verdicts = self.answers[source]
        return verdicts.pop(0) if len(verdicts) > 1 else verdicts[0]

    def close(self) -> None:
        self.closed = True
