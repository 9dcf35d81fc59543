"""A kernel that is right at the scored shape only, and ends in our fault elsewhere, is worth nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import mkb_env.agents
from mkb_env.env import Finish, KernelEnv, Submit

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()
ALLOCATE = "    y = torch.empty_like(hidden_states)\n"
ESCAPE = '    if hidden_states.shape[0] != 9:\n        torch.empty(4, device="cuda", dtype=torch.int32).fill_(2**40)\n'
BAD = GOOD.replace("grid=[cute.size(x, mode=[0]), 1, 1]", "grid=[9, 1, 1]").replace(ALLOCATE, ESCAPE + ALLOCATE)


@pytest.mark.parametrize(("source", "worth"), [(BAD, False), (GOOD, True)])
def test_final(source: str, worth: bool) -> None:
    env = KernelEnv(PROBLEM, dsl="cute", device="simulator")
    env.reset()
    env.step(Submit(source))
    result = env.step(Finish())[4]["result"]
    assert (result.score > 0) is worth and result.confirmed is worth
