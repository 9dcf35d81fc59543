"""Vector environments give each environment its own strings, with and without shared memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import mkb_env  # noqa: F401
from mkb_env.env import Kind

# Later Pythons warn when a process with threads forks; the threads are the test runner's, and forking is the default.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

NAME = "MKB/mlp-norm-cute-v0"
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("sync", {}),
    ("async", {}),
    ("async", {"shared_memory": False}),
    ("async", {"copy": False}),
    ("async", {"context": "spawn"}),
]
FIRST = "Größe → first\r\nnote."
SECOND = "Second note, longer than the first one by some words."


@pytest.mark.parametrize(("mode", "arguments"), WAYS)
def test_strings_are_right(mode: str, arguments: dict[str, Any]) -> None:
    envs = gym.make_vec(NAME, 2, vectorization_mode=mode, vector_kwargs=arguments, device="simulator")
    try:
        observation, info = envs.reset(seed=[0, 1], options={"problem": "rmsnorm_h128_qwen3_30b_bf16"})
        assert [text[:24] for text in observation["task"]] == ["RMSNorm over rows of 128"] * 2
        assert list(observation["stage"]) == ["", ""]
        assert list(info["dsl"]) == ["cute", "cute"]

        kinds = np.array([Kind.WRITE_SKILL, Kind.WRITE_SKILL])
        observation, *_ = envs.step({"kind": kinds, "text": (FIRST, SECOND)})
        assert list(observation["skill"]) == [FIRST, SECOND]

        kinds = np.array([Kind.SUBMIT, Kind.FINISH])
        observation, rewards, terminated, truncated, info = envs.step({"kind": kinds, "text": ("def solve(:", "")})
        assert list(observation["stage"]) == ["rejected", ""]
        assert "SyntaxError" in observation["feedback"][0]
        assert observation["feedback"][1].startswith("Finished.")
        assert list(observation["skill"]) == [FIRST, SECOND]
        assert list(observation["remaining_submissions"]) == [9, 10]
        assert (list(rewards), list(terminated), list(truncated)) == ([0.0, 0.0], [False, True], [False, False])
        assert info["verdict"][0].stage.value == "rejected"
        assert list(info["_verdict"]) == [True, False]

        # The step after an end resets that environment: its action is not looked at.
        kinds = np.array([Kind.WRITE_SKILL, Kind.SUBMIT])
        observation, _, terminated, _, _ = envs.step({"kind": kinds, "text": (SECOND, "def solve(:")})
        assert list(observation["skill"]) == [SECOND, ""]
        assert list(observation["stage"]) == ["rejected", ""]
        assert list(observation["remaining_submissions"]) == [9, 10]
        assert not terminated.any()
    finally:
        envs.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sampled_actions_and_their_verdicts_batch(mode: str) -> None:
    envs = gym.make_vec(NAME, 2, vectorization_mode=mode, device="simulator")
    try:
        envs.reset(seed=3)
        envs.action_space.seed(3)
        for _ in range(8):
            observation, *_ = envs.step(envs.action_space.sample())
            assert all(isinstance(text, str) for text in observation["feedback"])
    finally:
        envs.close()
