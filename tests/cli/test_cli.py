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
from mkb_env.cli.progress import numbered
from mkb_env.judge.verdict import Stage, Verdict
from mkb_env.servers import client

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
        "dtype": "bf16",
        "shape": "R 520128, zero_rows 3, large_rows 2, small_rows 2",
        "inputs": [
            {"name": "hidden_states", "sizes": [520128, 128], "dtype": "bfloat16"},
            {"name": "weight", "sizes": [128], "dtype": "bfloat16"},
        ],
        "outputs": [{"name": "y", "sizes": [520128, 128], "dtype": "bfloat16"}],
        "bytes": 2 * 128 * (2 * 520128 + 1),
        "flops": 5 * 128 * 520128,
        "unit": "fp32",
        "intensity": pytest.approx(1.25, rel=1e-5),
        "roofline_us": pytest.approx(266305792 / 4.8e6),
        "memory_bound": True,
        "kernels": ["cute", "tirx"],
        "ids": [f"MKB/rmsnorm-h128-qwen3-30b-bf16-{dsl}-v0" for dsl in ("cute", "tirx")],
        "family_ids": ["MKB/mlp-norm-cute-v0", "MKB/mlp-norm-tirx-v0"],
    }


def test_list_fits_80_columns_and_spells_the_ids() -> None:
    text = run("list")
    assert max(map(len, text.splitlines())) <= 80
    assert "mlp_norm: MKB/mlp-norm-DSL-v0" in text
    assert "\n    MKB/rmsnorm-h128-qwen3-30b-bf16-DSL-v0\n" in text


def test_a_slug_may_have_dashes_as_in_an_id() -> None:
    assert run("show", SLUG.replace("_", "-")) == run("show", SLUG)


def test_show() -> None:
    text = run("show", SLUG, "--dsl", "tirx")
    assert text.startswith("RMSNorm over rows of 128")
    assert "TIRx" in text
    shown = run_json("show", SLUG)
    assert [given["name"] for given in shown["inputs"]] == ["hidden_states", "weight"]
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


MISUSE = [
    (("show", "no_such_problem"), "no_such_problem"),
    (("show", SLUG, "--dsl", "cuda"), "cuda"),
    (("judge", "--problem", "no_such_problem", "--dsl", "cute", "FILE"), "no_such_problem"),
    (("judge", "--problem", SLUG, "--dsl", "cuda", "FILE"), "cuda"),
    (("judge", "--problem", SLUG, "--dsl", "cute", "--workload", "huge", "FILE"), "huge"),
    (("judge", "--problem", SLUG, "--dsl", "cute", "--device", "tpu", "FILE"), "tpu"),
    (("judge", "--problem", SLUG, "--dsl", "cute", "--device", "cuda:99", "FILE"), "cannot be used"),
    (("judge", "--problem", SLUG, "--dsl", "cute", "no_such_file.py"), "there is no"),
    (("judge", "--problem", SLUG, "--dsl", "cute", "FOLDER"), "got the folder"),
    (("judge", "--problem", SLUG, "FILE"), "--dsl"),
    (("record", "--problem", SLUG, "--dsl", "cute", "FILE"), "--output"),
    (("record", "--problem", SLUG, "--dsl", "cute", "FILE", "-o", "no/such/folder/plan"), "there is no folder"),
    (("record", "--problem", SLUG, "--dsl", "cute", "FILE", "-o", "FOLDER"), "is a directory"),
    (("replay", "--problem", SLUG, "FILE"), "plan"),
    (("no-such-command",), "no-such-command"),
]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("arguments", "told"), MISUSE)
def test_misuse_is_2_and_one_sentence(
    arguments: tuple[str, ...], told: str, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # so that no message is wrapped
    file = tmp_path / "kernel.py"
    file.write_text(BROKEN)
    real = {"FILE": str(file), "FOLDER": str(tmp_path)}
    words = [real.get(argument, argument) for argument in arguments]
    if as_json:
        answer = json.loads(run(*words, "--json", code=2))
        assert list(answer) == ["error"]
        assert told in answer["error"]
        return
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_runtime_folder_that_others_may_enter_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("MKB_RUNTIME_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["stop", *(["--json"] if as_json else [])])
    assert result.exit_code == 2
    sentence = json.loads(result.stdout)["error"] if as_json else result.stderr
    assert "must belong to user" in sentence


def test_a_server_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise client.ServerError("the server ended without an answer")

    monkeypatch.setattr(client, "stop_all", fail)
    assert run_json("stop", code=2) == {"error": "the server ended without an answer"}


def test_ctrl_c_is_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "stop_all", interrupt)
    result = CliRunner().invoke(app, ["stop"])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_full_shapes_in_the_simulator_come_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(BROKEN)
    arguments = ["judge", "-p", SLUG, "-d", "cute", "--device", "simulator", str(file), "-w"]
    assert "may take minutes" in CliRunner().invoke(app, [*arguments, "full"]).stderr
    assert CliRunner().invoke(app, [*arguments, "small"]).stderr == ""


def test_progress_numbers_the_shapes() -> None:
    lines: list[str] = []
    tell = numbered(lines.append)
    for stage in ("solve", "check 1/2", "check 2/2", "check 1/2", "check 2/2"):
        tell(stage)
    assert lines == ["solve", "check 1/2", "check 2/2", "shape 2: check 1/2", "shape 2: check 2/2"]


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
