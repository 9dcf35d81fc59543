"""Reading a source or a reply takes seconds and never raises, whatever it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import mkb_env.agents
from mkb_env.env import Submit
from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage
from mkb_env.legality import check
from mkb_env.wrappers import read_reply

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()
ALLOCATE = "    y = torch.empty_like(hidden_states)\n"


def test_deep_default() -> None:
    total = "+".join(["1"] * 800)
    source = GOOD[: GOOD.index("def solve")] + f"def solve(a, b, c, d={total}):\n    return a\n"
    assert Judge("simulator").judge(source, PROBLEM, "cute", "small").stage is Stage.REJECTED


def test_long_chain() -> None:
    started = time.monotonic()
    assert check(GOOD + "\nx = lambda: torch" + ".a" * 1000 + "\n", "cute", ("a", "b")) is None
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("reply", ["~" * 1000 + "`", "```" + "a" * 30000 + "`", "\n" * 30000])
def test_reply(reply: str) -> None:
    started = time.monotonic()
    assert read_reply(reply) is None and time.monotonic() - started < 1


def test_honest_control() -> None:
    assert read_reply(f"```python\n{GOOD}```") == Submit(GOOD)
