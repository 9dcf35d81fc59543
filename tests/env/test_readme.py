"""The Python examples of the README and of docs/env.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mkb_env

ROOT = Path(mkb_env.__file__).parents[1]


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    code = blocks[0].replace('device="auto"', 'device="simulator"')
    assert "simulator" in code
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "'(' was never closed" in printed
    assert "\npassed " in printed
    assert float(printed.splitlines()[-1]) > 0


def test_batched_actions(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/env.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/env.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*?)(?:: .*)?$", code, re.MULTILINE)
    assert len(promised) == 2
    assert capsys.readouterr().out.splitlines() == promised
