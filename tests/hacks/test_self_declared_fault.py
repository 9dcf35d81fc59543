"""A recording that calls its own failure ours (``infra_error`` costs no step) is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

import mkb_env.agents
from mkb_env.judge import client as client_module
from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()
FORGED = """
from mkb_env.recorder import record
from mkb_env.recorder.protocol import Failure

real = record.Recording
record.Recording = lambda plans, failure, log, seconds: real((), Failure("{kind}", "a free retry"), log, seconds)
"""


@pytest.mark.parametrize("kind", ["infra_error", "unsupported", "timeout"])
def test_the_submission_pays(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(client_module, "check", lambda *_, **__: None)
    verdict = Judge("simulator").judge(GOOD + FORGED.format(kind=kind), PROBLEM, "cute", "small")
    assert verdict.stage is Stage.HOST_ERROR and verdict.stage.costs_step, verdict


def test_honest_control() -> None:
    assert Judge("simulator").judge(GOOD, PROBLEM, "cute", "small").stage is Stage.PASSED
