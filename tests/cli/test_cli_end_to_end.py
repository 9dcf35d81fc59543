"""Real kernels through the command line, in the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from mkb_env.agents.scripted import DEMO
from mkb_env.cli.app import app
from mkb_env.plan import decode, encode

SLUG = "rmsnorm_h128_qwen3_30b_bf16"
KERNEL = DEMO / "rmsnorm_cute.py"


def run(*arguments: str, code: int) -> Any:
    """The one JSON object that a command prints, which ends with ``code``."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.mark.parametrize(("source", "stage", "code"), [("right", "passed", 0), ("wrong", "incorrect", 1)])
def test_judge(tmp_path: Path, source: str, stage: str, code: int) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL.read_text() if source == "right" else KERNEL.read_text().replace("EPS = 1e-6", "EPS = 1.0"))
    verdict = run("judge", "-p", SLUG, "-d", "cute", "--device", "simulator", str(file), code=code)
    assert verdict["stage"] == stage
    assert verdict["simulated"]
    assert (verdict["timing"] is not None) == (stage == "passed")
    assert verdict["kernels"][0]["grid"] == [9, 1, 1]


def test_record_then_replay(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    told = run("record", "-p", SLUG, "-d", "cute", "-w", "small", str(KERNEL), "-o", str(file), code=0)
    plan = decode(file.read_bytes())
    assert told["sha256"] == plan.digest()
    assert told["bytes"] == file.stat().st_size
    assert told["launches"] == [{"kernel": plan.launches[0].kernel, "grid": [9, 1, 1], "block": [32, 1, 1]}]
    verdict = run("replay", str(file), "--device", "simulator", "--no-timing", code=0)
    assert (verdict["stage"], verdict["timing"]) == ("passed", None)
    assert verdict["plan_sha256"] == plan.digest()
    assert verdict["source_sha256"] == plan.source_sha256


def test_options_of_replay_may_repeat_what_the_plan_says_but_not_contradict_it(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    run("record", "-p", SLUG, "-d", "cute", "-w", "heldout", "--shape", "1", str(KERNEL), "-o", str(file), code=0)
    replay = ("replay", str(file), "--device", "simulator")
    repeated = ("-p", SLUG.replace("_", "-"), "-w", "heldout", "--shape", "1")
    assert run(*replay, *repeated, code=0)["stage"] == "passed"
    other = "fused_add_rmsnorm_h4096_llama31_8b_bf16"
    for option, value in (("--problem", other), ("--workload", "small"), ("--shape", "0")):
        told = run(*replay, option, value, code=2)["error"]
        assert f"this plan was recorded for {SLUG}, heldout, shape 1; got {option} {value}" in told


def test_an_old_plan_needs_the_options_and_does_not_pass_for_another_shape(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    run("record", "-p", SLUG, "-d", "cute", "-w", "heldout", str(KERNEL), "-o", str(file), code=0)
    old = msgspec.structs.replace(decode(file.read_bytes()), problem="", workload="", shape=0)
    file.write_bytes(encode(old))
    assert "give --problem" in run("replay", str(file), "--device", "simulator", code=2)["error"]
    verdict = run("replay", str(file), "-p", SLUG, "-w", "small", "--device", "simulator", code=1)
    assert verdict["stage"] != "passed"


def test_doctor_finds_this_machine_well() -> None:
    report = run("doctor", "--device", "simulator", code=0)
    assert report["healthy"]
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("a CuTe DSL kernel", "a TIRx kernel", "recorder's C libraries", "torch"):
        assert checks[name]["ok"], checks[name]
        assert checks[name]["required"]
