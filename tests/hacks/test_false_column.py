"""A message that names an absurd column must not make the feedback that wide."""

from __future__ import annotations

from pathlib import Path

import mkb_env.agents
from mkb_env.env import KernelEnv, Submit

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()
ALLOCATE = "    y = torch.empty_like(hidden_states)\n"


def test_step() -> None:
    env = KernelEnv(PROBLEM, dsl="cute", device="simulator")
    env.reset()
    body = 'def solve(a, b):\n    raise RuntimeError("submission.py:1:99999999999999")\n'
    assert env.step(Submit(GOOD[: GOOD.index("def solve")] + body))[0]["stage"] == "host_error"
    assert env.step(Submit(GOOD))[0]["stage"] == "passed"
