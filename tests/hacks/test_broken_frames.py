"""A frame or a recording that cannot be decoded is a host error, not an exception of the judge."""

from __future__ import annotations

from pathlib import Path

import pytest

import mkb_env.agents
from mkb_env.judge import client as client_module
from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()
ALLOCATE = "    y = torch.empty_like(hidden_states)\n"
FORGE = """
import os
import msgspec

for name in os.listdir("/proc/self/fd"):
    try:
        if os.readlink("/proc/self/fd/" + name).startswith("socket:"):
            data = int(name)
    except OSError:
        pass
frame = {frame}
os.write(data, len(frame).to_bytes(4, "little") + frame)
os._exit(0)
"""
DEEP = r'b"\x81\xa1x" + b"\x91" * 50000 + b"\xc0"'


@pytest.mark.parametrize("frame", [DEEP, f"msgspec.msgpack.encode(dict(result={DEEP}))"], ids=["frame", "recording"])
def test_verdict(monkeypatch: pytest.MonkeyPatch, frame: str) -> None:
    monkeypatch.setattr(client_module, "check", lambda *_, **__: None)
    judge = Judge("simulator")
    assert judge.judge(GOOD + FORGE.format(frame=frame), PROBLEM, "cute", "small").stage is Stage.HOST_ERROR
    assert judge.judge(GOOD, PROBLEM, "cute", "small").stage is Stage.PASSED
