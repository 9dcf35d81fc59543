"""The server, unconfined, removes a submission's scratch folder: a link in it must not lead it elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import mkb_env.agents
from mkb_env.judge import client as client_module
from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()


def test_what_a_link_names_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client_module, "check", lambda *_, **__: None)
    kept = tmp_path / "folder" / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    link = f'import os\nos.mkdir("own")\nos.symlink({str(kept.parent)!r}, "own/link")\nprint("linked")\n'
    judge = Judge("simulator")
    verdict = judge.judge(GOOD + link, PROBLEM, "cute", "small")
    assert verdict.stage is Stage.PASSED and "linked" in verdict.log, verdict
    assert judge.judge(GOOD, PROBLEM, "cute", "small").stage is Stage.PASSED  # control, and the removal is over by now
    assert kept.read_text() == "kept"
