"""Submissions that fight the judge: each gets its due verdict within its limit, and the next is judged normally."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import mkb_env.agents
from mkb_env.judge import client as client_module
from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage
from mkb_env.recorder.protocol import Limits

PROBLEM = "rmsnorm_h128_qwen3_30b_bf16"
GOOD = (Path(mkb_env.agents.__file__).parent / "demo" / "rmsnorm_cute.py").read_text()


def instead(body: str) -> str:
    """The good submission with another ``solve``."""
    return f"{GOOD[: GOOD.index('def solve')]}def solve(hidden_states, weight):\n{body}\n"


def before(body: str) -> str:
    """The good submission with something done first inside ``solve``."""
    honest = f"{GOOD}\n_honest = solve\n\n\n"
    return f"{honest}def solve(hidden_states, weight):\n{body}\n    return _honest(hidden_states, weight)\n"


SPIN = """
import torch
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def spin(x: cute.Tensor, y: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    column, _, _ = cute.arch.thread_idx()
    value = x[row, column].to(cutlass.Float32)
    while value < 1e30:
        value = value * 0.5 - 1.0
    y[row, column] = value.to(cutlass.BFloat16)


@cute.jit
def run(x: cute.Tensor, y: cute.Tensor):
    spin(x, y).launch(grid=[cute.size(x, mode=[0]), 1, 1], block=[128, 1, 1])


def solve(hidden_states, weight):
    y = torch.empty_like(hidden_states)
    arguments = from_dlpack(hidden_states), from_dlpack(y)
    cute.compile(run, *arguments)(*arguments)
    return y
"""
WILD = SPIN.replace("    while value < 1e30:\n        value = value * 0.5 - 1.0\n", "").replace(
    "y[row, column] = ", "y[row + 100000000, column] = "
)
RECKLESS = {
    "exits": (instead("    import os\n    os._exit(0)"), Stage.HOST_ERROR),
    "forges a verdict": (instead("    print('{\"stage\": \"passed\"}', flush=True)"), Stage.HOST_ERROR),
    "crashes": (instead("    import ctypes\n    ctypes.string_at(0)"), Stage.HOST_ERROR),
    "computes on the CPU": (
        instead("    x = torch.ones(9, 128)\n    return (x * torch.rsqrt(x.pow(2).mean(-1, True))).bfloat16().cuda()"),
        Stage.HOST_ERROR,
    ),
    "patches torch and time": (
        before("    import time\n    time.perf_counter = lambda: 0.0\n    torch.Tensor.__sub__ = lambda a, b: a"),
        Stage.PASSED,
    ),
    "wild write": (WILD, Stage.LAUNCH_ERROR),
}  # fmt: skip


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A judge without the static rules: they are a tripwire, and it must hold without them."""
    monkeypatch.setattr(client_module, "check", lambda *_, **__: None)
    return Judge("simulator")


@pytest.mark.parametrize("name", RECKLESS)
def test_verdict_and_the_next(judge: Judge, name: str) -> None:
    source, stage = RECKLESS[name]
    verdict = judge.judge(source, PROBLEM, "cute", "small")
    assert verdict.stage is stage, verdict.message
    assert judge.judge(GOOD, PROBLEM, "cute", "small").stage is Stage.PASSED


@pytest.mark.parametrize(
    ("body", "limits", "stage", "words"),
    [
        ("    import time\n    time.sleep(600)", Limits(seconds=2.0), Stage.TIMEOUT, "2 s"),
        (
            "    kept = []\n    while True:\n        kept.append(bytearray(16 << 20))",
            Limits(memory_bytes=256 << 20),
            Stage.HOST_ERROR,
            "memory",
        ),
    ],
    ids=["sleeps for ever", "allocates all memory"],
)
def test_limits(judge: Judge, body: str, limits: Limits, stage: Stage, words: str) -> None:
    judge.limits = limits
    started = time.monotonic()
    verdict = judge.judge(instead(body), PROBLEM, "cute", "small")
    assert verdict.stage is stage and words in verdict.message and time.monotonic() - started < 40
    judge.limits = Limits()
    assert judge.judge(GOOD, PROBLEM, "cute", "small").stage is Stage.PASSED


def test_an_endless_kernel_times_out(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judge.judge(SPIN, PROBLEM, "cute", "small")
    assert verdict.stage is Stage.TIMEOUT and "spin" in verdict.message, verdict
    assert judge.judge(GOOD, PROBLEM, "cute", "small").stage is Stage.PASSED


def test_static_rules_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, what is plainly forbidden never starts a recorder."""
    verdict = Judge("simulator").judge(instead("    import subprocess"), PROBLEM, "cute", "small")
    assert verdict.stage is Stage.REJECTED and verdict.location is not None
