"""The outside behaviour in a minute's reading. Nothing is compiled or run here: no torch, no DSL, no server."""

from __future__ import annotations

import gymnasium as gym
import pytest

from mkb_env import Finish, Stage, Submit, TextAction, Verdict, WriteSkill

NAME = "MKB/rmsnorm-h128-qwen3-30b-bf16-cute-v0"


@pytest.fixture
def env() -> gym.Env:
    return gym.make(NAME, device="simulator", max_submissions=3)


def test_ids_are_registered() -> None:
    assert NAME in gym.registry
    assert "MKB/fused-attn-tirx-v0" in gym.registry


def test_reset_tells_the_task_the_contract_and_the_budget(env: gym.Env) -> None:
    observation, info = env.reset(seed=0)
    assert "RMSNorm over rows of 128" in observation["task"]
    assert "def solve" in observation["contract"]
    assert observation["remaining_submissions"] == 3
    assert info["problem"] == "rmsnorm_h128_qwen3_30b_bf16"


def test_a_source_that_does_not_parse_is_rejected_with_its_line(env: gym.Env) -> None:
    env.reset()
    observation, reward, terminated, truncated, info = env.step(Submit("import cutlass\ndef solve(x:\n"))
    assert info["verdict"].stage is Stage.REJECTED
    assert info["verdict"].location.line == 2
    assert "def solve(x:" in observation["feedback"]
    assert (reward, terminated, truncated) == (0.0, False, False)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("x = 1", "[solve]"),
        ("def solve(x, w): return x", "[dsl]"),
        ("import cutlass\ndef solve(x): return x", "[arguments]"),
        ("import cutlass, tvm\ndef solve(x, w): return x", "[other-dsl]"),
        ("import cutlass, triton\ndef solve(x, w): return x", "[compiler]"),
    ],
)
def test_a_rule_that_is_broken_is_named(env: gym.Env, source: str, rule: str) -> None:
    env.reset()
    observation, *_ = env.step(Submit(source))
    assert rule in observation["feedback"]
    assert observation["stage"] == "rejected"


def test_the_last_submission_ends_the_episode(env: gym.Env) -> None:
    env.reset()
    ended = [env.step(Submit("x = 1"))[2] for _ in range(3)]
    assert ended == [False, False, True]
    with pytest.raises(gym.error.ResetNeeded):
        env.step(Finish())


def test_a_skill_survives_the_episode_and_starts_the_next(env: gym.Env) -> None:
    env.reset()
    env.step(WriteSkill("Keep sums in float32."))
    observation, _, terminated, _, info = env.step(Finish())
    assert terminated
    assert info["result"].score == 0.0
    observation, _ = env.reset(options={"skill": observation["skill"]})
    assert observation["skill"] == "Keep sums in float32."


def test_plain_replies(env: gym.Env) -> None:
    wrapped = TextAction(env)
    wrapped.reset()
    *_, info = wrapped.step("I would write:\n```python\nimport cutlass\ndef solve(: ...\n```")
    assert info["action"] == "submit"
    observation, *_, info = wrapped.step("I do not know.")
    assert info["action"] == "none"
    assert observation["feedback"].startswith("NO ACTION WAS FOUND")


def test_a_verdict_is_one_json_object(env: gym.Env) -> None:
    env.reset()
    verdict = env.step(Submit("def solve(:"))[4]["verdict"]
    assert Verdict.from_json(verdict.to_json()) == verdict
