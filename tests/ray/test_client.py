"""Without a cluster, or with one that has to be started first."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

import mkb_env  # noqa: F401
from mkb_env.devices.ray_actors import Turns
from mkb_env.judge.client import Judge
from mkb_env.judge.pipeline import Pipeline
from mkb_env.servers.client import ServerError

NAME = "MKB/rmsnorm-h128-qwen3-30b-bf16-cute-v0"


def test_a_missing_extra_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for attempt in (lambda: Judge("ray"), lambda: gym.make(NAME, device="ray"), lambda: Pipeline(["ray:cuda"])):
        with pytest.raises(ValueError, match=r'needs Ray, which is not installed: pip install "mkb-env\[ray\]"'):
            attempt()


def test_names_of_devices() -> None:
    for name in ("ray:tpu", "ray:", "rays", "ray:cuda:0"):
        with pytest.raises(ValueError, match="device must be auto, simulator, cuda, cuda:N or ray, got"):
            Judge(name)


def test_no_cluster_at_the_address() -> None:
    """In a process of its own: another test may have joined a cluster in this one."""
    code = (
        "from mkb_env.judge.client import Judge; judge = Judge('ray')\n"
        "verdict = judge.judge('x', 'rmsnorm_h128_qwen3_30b_bf16', 'cute')\n"
        "print(verdict.stage, verdict.message)"
    )
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:9"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "infra_error no Ray cluster at 127.0.0.1:9: nothing listens there\n", ran.stderr
    mkb = str(Path(sys.executable).with_name("mkb"))
    asked = ["judge", "--device", "ray", "-p", "rmsnorm_h128_qwen3_30b_bf16", "-d", "cute", "-"]
    for command in (asked, ["stop", "--ray"]):
        ran = subprocess.run([mkb, *command], env=environment, input="x", capture_output=True, text=True, timeout=60)
        assert ran.returncode == 2 and "nothing listens there" in ran.stderr


LOCAL = """
import sys
from mkb_env.devices.ray_cluster import connect
connect()
import ray
from ray._common.usage.usage_lib import usage_stats_enabled
print(ray.get_runtime_context().gcs_address, usage_stats_enabled(), flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(90)
def test_processes_share_the_cluster_that_one_of_them_starts(tmp_path: Path) -> None:
    # Ray keeps its own secret, which it asks of those who join, in the home folder.
    environment = {**os.environ, "MKB_RUNTIME_DIR": str(tmp_path / "runtime"), "HOME": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    drivers = [
        subprocess.Popen(
            [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", LOCAL],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        told = [driver.stdout.readline().split() for driver in drivers if driver.stdout]
    finally:
        for driver in drivers:
            driver.communicate("", timeout=30)
    assert told[0] == told[1]
    assert told[0][0].startswith("127.0.0.1:") and told[0][1] == "False"


def test_turns_go_by_priority_and_none_is_lost() -> None:
    async def work() -> list[int]:
        turns, order = Turns(1), []

        async def job(priority: int) -> None:
            await turns.take(priority)
            order.append(priority)
            await asyncio.sleep(0)
            turns.give()

        jobs = [asyncio.create_task(job(priority)) for priority in (10, 10, 0, 5)]
        await asyncio.sleep(0)
        assert turns.load == 4
        jobs[1].cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert turns.load == 0
        return order

    assert asyncio.run(work()) == [10, 0, 5]


def test_a_pipeline_fails_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def hire(device: str) -> None:
        raise ServerError("no Ray cluster")

    monkeypatch.setattr("mkb_env.judge.client.hire", hire)
    with pytest.raises(ServerError, match="no Ray cluster"):
        Pipeline(["ray"])
