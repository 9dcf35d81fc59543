"""Judging on a cluster: right verdicts, one for each submission, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgspec
import pytest
import ray

import mkb_env
from mkb_env.devices import ray as cluster_client
from mkb_env.devices.ray import NAMESPACE, stop_actors
from mkb_env.devices.ray_actors import Job
from mkb_env.judge.client import Judge
from mkb_env.judge.jobs import DeviceJob
from mkb_env.judge.pipeline import Pipeline, Submission
from mkb_env.judge.verdict import Stage
from mkb_env.servers.wire import runtime_folder

pytestmark = pytest.mark.slow  # minutes on two cores that others use too

SLUG = "rmsnorm_h128_qwen3_30b_bf16"
DEMO = Path(__file__).parents[2] / "agents/demo"
GOOD = {dsl: DEMO.joinpath(f"rmsnorm_{dsl}.py").read_text() for dsl in ("cute", "tirx")}
WRONG = GOOD["cute"].replace("squares / WIDTH", "squares / 120")


def submission(number: int, source: str = GOOD["cute"], dsl: str = "cute") -> Submission:
    return Submission(f"{source}\n# {number}\n", SLUG, dsl, "small", timing=False, draws=1)


def actor_names() -> set[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return {found["name"] for found in named if found["namespace"] == NAMESPACE}


def wait_for_recorders(count: int) -> None:
    """Until drivers count on so many; they look at the nodes every few seconds."""
    deadline = time.monotonic() + 40
    while (found := Judge("ray").workers.recorders) != count:
        assert time.monotonic() < deadline, f"{found} recorders, not {count}"
        time.sleep(0.2)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the actors that this driver gave up, in order."""
    names: list[str] = []
    lose = cluster_client._Fleet._lose

    def spy(self: Any, post: Any, dead: bool) -> None:
        names.append(post.name)
        lose(self, post, dead)

    monkeypatch.setattr(cluster_client._Fleet, "_lose", spy)
    return names


def test_right_verdicts_for_good_and_bad(cluster: Any) -> None:
    judge = Judge("ray")
    stages: list[str] = []
    shown: list[str] = []
    assert judge.simulated and judge.default_workload == "small" and judge.workers.recorders == 3
    for number, source in enumerate([GOOD["cute"], "def solve(x:", WRONG]):
        one = submission(number, source)
        stages.append(judge.judge(one.source, SLUG, "cute", on_progress=shown.append).stage.value)
    assert stages == ["passed", "rejected", "incorrect"]
    assert judge.judge(GOOD["tirx"], SLUG, "tirx", timing=False).device == judge.device_name == "simulator (sm_90a)"
    assert "solve" in shown


def test_keys_do_not_reach_the_servers(cluster: Any) -> None:
    judge = Judge("ray")
    assert judge.judge(GOOD["cute"], SLUG, "cute", timing=False).passed
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = process.joinpath("cmdline").read_bytes().decode()
            if "mkb_env.servers." in command and str(runtime_folder()) in command:
                found.append(process.joinpath("environ").read_bytes().decode())
        except OSError:  # it has ended
            continue
    assert len(found) >= 2
    assert not any("MKB_TEST_API_KEY" in environment or "RAY_ADDRESS" in environment for environment in found)


DRIVER = """
import json, sys
from mkb_env.judge.pipeline import Pipeline, Submission
source, slug, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
sources = [f"{source}\\n# {number}\\n" for number in range(first, first + 4)]
several = [Submission(source, slug, "cute", "small", timing=False, draws=1) for source in sources]
with Pipeline(["ray"]) as pipeline:
    print(json.dumps([[number, verdict.stage] for number, verdict in pipeline.judge(several)]))
"""


def test_drivers_share_the_actors(cluster: Any) -> None:
    drivers = [
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", "-c", DRIVER, GOOD["cute"], SLUG, str(100 * number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for driver in drivers:
        told = json.loads(driver.communicate(timeout=120)[0].splitlines()[-1])
        assert sorted(told) == [[number, "passed"] for number in range(4)]
    assert Judge("ray").workers.recorders == 3
    kinds = Counter(name.partition("-")[0] for name in actor_names())
    assert kinds == {"recorder": 3, "simulator": 3}


def test_an_environment_and_its_vector(cluster: Any) -> None:
    name = f"MKB/{SLUG.replace('_', '-')}-cute-v0"
    envs = gym.make_vec(name, 2, vectorization_mode="async", vector_kwargs={"context": "spawn"}, device="ray")
    try:
        envs.reset(seed=0)
        actions = {"kind": [mkb_env.Submit("")["kind"]] * 2, "text": (GOOD["cute"], WRONG)}
        observation, rewards, *_ = envs.step(actions)
        assert list(observation["stage"]) == ["passed", "incorrect"]
        assert rewards[0] > 0 == rewards[1]
    finally:
        envs.close()


def test_evaluators_that_die_are_replaced(cluster: Any, lost: list[str]) -> None:
    assert Judge("ray").judge(GOOD["cute"], SLUG, "cute", timing=False).passed
    killed = {name for name in actor_names() if name.startswith("simulator")}
    with Pipeline(["ray"]) as pipeline:
        verdicts = pipeline.judge(submission(number) for number in range(200, 212))
        every = [next(verdicts)]
        for name in killed:
            ray.kill(ray.get_actor(name, NAMESPACE))
        every += verdicts
    assert sorted(number for number, _ in every) == list(range(12))
    assert all(verdict.passed for _, verdict in every)
    assert lost and set(lost) <= killed


def test_a_silent_actor_is_given_up(cluster: Any, lost: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped is not dead, so Ray says nothing."""
    assert Judge("ray").judge(GOOD["cute"], SLUG, "cute", timing=False).passed
    monkeypatch.setattr(cluster_client, "SILENCE_SECONDS", 2.0)
    silent = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_station(path)][:1]
    os.kill(silent[0], signal.SIGSTOP)
    try:
        with Pipeline(["ray"]) as pipeline:
            every = list(pipeline.judge(submission(number) for number in range(300, 309)))
    finally:
        os.kill(silent[0], signal.SIGCONT)
    assert sorted(number for number, _ in every) == list(range(9))
    assert all(verdict.passed for _, verdict in every)
    assert len(set(lost)) == 1


def _is_station(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(b"ray::Station")
    except OSError:  # it has ended
        return False


def test_a_node_that_dies_loses_nothing(cluster: Any, lost: list[str]) -> None:
    """Every submission gets exactly one verdict, and all of them the right one."""
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
    wait_for_recorders(4)
    results: list[tuple[int, Stage]] = []
    several = [submission(number, WRONG if number % 5 == 4 else GOOD["cute"]) for number in range(20)]
    with Pipeline(["ray"]) as pipeline:
        for number, verdict in pipeline.judge(several):
            results.append((number, verdict.stage))
            if len(results) == 4:
                cluster.remove_node(node, allow_graceful=False)
    assert sorted(results) == [(number, Stage.INCORRECT if number % 5 == 4 else Stage.PASSED) for number in range(20)]
    assert any(name.endswith(node.node_id) for name in lost)
    wait_for_recorders(3)


def test_gpus_have_actors_of_their_own(cluster: Any) -> None:
    """Ray is told of two GPUs. Whether they are there is for their servers to find out."""
    node = cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=80 << 20, include_dashboard=False)
    try:
        wait_for_recorders(4)
        deadline = time.monotonic() + 10
        while Judge("ray").workers.device != "cuda" and time.monotonic() < deadline:
            time.sleep(0.2)
        assert Judge("ray").workers.device == "cuda" and not Judge("ray").simulated
        assert Judge("ray").workers.evaluators == 2 and Judge("ray").default_workload == "full"
        assert Judge("ray:simulator").workers.device == "simulator"
        job = Job(msgspec.msgpack.encode(DeviceJob()), seconds=30)
        for number in range(2):
            ray.get(ray.get_actor(f"cuda-{node.node_id}-{number}", NAMESPACE).call.remote("ticket", job))
        servers = {path.name.split("-")[1] for path in runtime_folder().glob("judge-evaluator*.log")}
        assert {"evaluator0", "evaluator1"} <= servers
    finally:
        cluster.remove_node(node, allow_graceful=False)
        wait_for_recorders(3)


def test_actors_can_be_ended(cluster: Any) -> None:
    assert Judge("ray:simulator").judge(GOOD["cute"], SLUG, "cute", timing=False).passed
    assert stop_actors() >= 6
    assert not actor_names()
    assert Judge("ray:simulator").workers.recorders == 3
    assert len(actor_names()) == 6


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # that it is one is what it tests
def test_a_forked_process_is_told(cluster: Any) -> None:
    Judge("ray").workers  # noqa: B018 - connects
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, Judge("ray").judge(GOOD["cute"], SLUG, "cute").message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"was forked from one that uses Ray" in os.read(read, 1000)
    os.close(read)
    os.close(write)
