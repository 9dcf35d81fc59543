"""``mkb bench judge``: real verdicts of fresh sources, one JSON object."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from mkb_env.cli.app import app
from mkb_env.judge.bench import fresh

SLUG = "rmsnorm_h128_qwen3_30b_bf16"


def test_no_two_sources_are_alike_and_none_shows_the_canary() -> None:
    submissions = fresh(SLUG, "cute", "small")
    sources = {next(submissions).source for _ in range(5)}
    assert len(sources) == 5
    assert not any("canary" in source for source in sources)


def test_bench_judge() -> None:
    arguments = ["bench", "judge", "--device", "simulator", "--seconds", "8", "-d", "cute", "-p", SLUG, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["simulated"] is True and report["recorders"] >= 1
    [row] = report["rows"]
    assert (row["dsl"], row["problem"], row["workload"], row["not_passed"]) == ("cute", SLUG, "small", 0)
    assert 0 < row["latency_p50"] <= row["latency_p95"] and row["latency_count"] >= 1
    assert report["verdicts_per_minute"] > 0 and row["throughput_count"] >= 1
    assert row["device_utilisation"] is None and row["spread"] is None
    assert row["seconds_by_stage"]["solve"] > 0, "compiled, not taken from the cache"


def test_a_problem_without_a_kernel_is_misuse() -> None:
    result = CliRunner().invoke(app, ["bench", "judge", "-p", "nothing_bf16", "--device", "simulator"])
    assert result.exit_code == 2 and "no problem is called 'nothing_bf16'" in result.stderr
