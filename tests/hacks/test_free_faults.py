"""Memory steps that no device can do are not our fault: they cost a step."""

from __future__ import annotations

from pathlib import Path

import pytest

import mkb_env.agents
from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()
ALLOCATE = "    y = torch.empty_like(hidden_states)\n"
STEPS = (
    'torch.empty(4, device="cuda", dtype=torch.int32).fill_(2**40)',
    'torch.empty(4, device="cuda", dtype=torch.int64).fill_(float("nan"))',
    'torch.empty(4, device="cuda", dtype=torch.float4_e2m1fn_x2).fill_(1.0)',
    'torch.empty(60 << 30, device="cuda", dtype=torch.uint8).fill_(1)',
    't = torch.empty(64, device="cuda"); t[1:].copy_(t[:-1])',
)


@pytest.mark.parametrize("step", STEPS)
def test_costs_a_step(step: str) -> None:
    verdict = Judge("simulator").judge(GOOD.replace(ALLOCATE, f"    {step}\n{ALLOCATE}"), PROBLEM, "cute", "small")
    assert verdict.stage.costs_step, verdict.message


def test_honest_control() -> None:
    assert Judge("simulator").judge(GOOD, PROBLEM, "cute", "small").stage is Stage.PASSED
