"""The command line: exit codes, and exactly one JSON object on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mkb_env.cli.app import app
from mkb_env.judge.verdict import Stage, Verdict

SLUG = "rmsnorm_h128_qwen3_30b_bf16"
BROKEN = "import cutlass\ndef solve(x, weight:\n    return x\n"


def run(*arguments: str, code: int = 0, stdin: str = "") -> str:
    """What a command prints on stdout; it must end with ``code``."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == code, result.output
    return result.stdout


def run_json(*arguments: str, code: int = 0, stdin: str = "") -> Any:
    """The one JSON object on stdout."""
    text = run(*arguments, "--json", code=code, stdin=stdin)
    assert text.count("\n") == 1
    return json.loads(text)


def test_list() -> None:
    assert SLUG in run("list")
    problems = {problem["slug"]: problem for problem in run_json("list")["problems"]}
    assert problems[SLUG] == {
        "slug": SLUG,
        "number": 36,
        "family": "mlp_norm",
        "title": "RMSNorm over rows of 128",
        "model": "Qwen3-30B-A3B",
        "kernels": ["cute", "tirx"],
    }


def test_show() -> None:
    text = run("show", SLUG, "--dsl", "tirx")
    assert text.startswith("RMSNorm over rows of 128")
    assert "TIRx" in text
    shown = run_json("show", SLUG)
    assert shown["inputs"] == ["hidden_states", "weight"]
    assert f"MKB/{SLUG.replace('_', '-')}-cute-v0" in shown["ids"]
    assert shown["contract"] is None


@pytest.mark.parametrize("via", ["file", "stdin"])
def test_a_source_that_does_not_parse_is_judged_without_a_recorder(tmp_path: Path, via: str) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(BROKEN)
    where = str(file) if via == "file" else "-"
    arguments = ("judge", "--problem", SLUG, "--dsl", "cute", "--device", "simulator", where)
    stdin = "" if via == "file" else BROKEN
    assert "SyntaxError" in run(*arguments, code=1, stdin=stdin)
    verdict = Verdict.from_json(json.dumps(run_json(*arguments, code=1, stdin=stdin)))
    assert verdict.stage is Stage.REJECTED
    assert verdict.workload == "small"
    assert verdict.location is not None
    assert verdict.location.line == 2


def test_bytes_that_are_no_utf8_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_bytes(b"import cutlass\n# \xff\n")
    verdict = run_json("judge", "--problem", SLUG, "--dsl", "cute", "--device", "simulator", str(file), code=1)
    assert verdict["error_class"] == "text"


def test_record_says_why_there_is_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(BROKEN)
    plan = tmp_path / "plan"
    answer = run_json("record", "--problem", SLUG, "--dsl", "cute", str(file), "-o", str(plan), code=1)
    assert answer["plan"] is None
    assert answer["failure"]["kind"] == "rejected"
    assert not plan.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "no_such_problem"),
        ("show", SLUG, "--dsl", "cuda"),
        ("judge", "--problem", "no_such_problem", "--dsl", "cute", "FILE"),
        ("judge", "--problem", SLUG, "--dsl", "cuda", "FILE"),
        ("judge", "--problem", SLUG, "--dsl", "cute", "--workload", "huge", "FILE"),
        ("judge", "--problem", SLUG, "--dsl", "cute", "--device", "tpu", "FILE"),
        ("judge", "--problem", SLUG, "--dsl", "cute", "no_such_file.py"),
        ("judge", "--problem", SLUG, "FILE"),
        ("record", "--problem", SLUG, "--dsl", "cute", "FILE"),
        ("replay", "--problem", SLUG, "FILE"),
        ("no-such-command",),
    ],
)
def test_misuse_is_2_and_leaves_stdout_empty(arguments: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(BROKEN)
    assert run(*(str(file) if argument == "FILE" else argument for argument in arguments), code=2) == ""


def test_the_process_stays_light() -> None:
    code = (
        "import sys; from mkb_env.cli.app import app\n"
        "try: app(['judge', '--problem', sys.argv[1], '--dsl', 'cute', '--device', 'simulator', '--json', '-'])\n"
        "except SystemExit as end: assert end.code == 1\n"
        "print([m for m in ('torch', 'cutlass', 'tvm', 'rich.table') if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, SLUG], input=BROKEN, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(result.stdout)["stage"] == "rejected"
    assert result.stderr.strip() == "[]"
