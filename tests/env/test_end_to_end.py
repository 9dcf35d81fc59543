"""Real submissions through the environment: both DSLs compile, the plans run in the simulator, the outputs decide."""

from __future__ import annotations

import io
from collections.abc import Iterator

import gymnasium as gym
import pytest
from rich.console import Console

import mkb_env  # noqa: F401
from mkb_env.agents import scripted
from mkb_env.env import Finish, Submit
from mkb_env.judge.verdict import Stage
from mkb_env.registration import problem_id

SLUG = "rmsnorm_h128_qwen3_30b_bf16"


@pytest.fixture
def env() -> Iterator[gym.Env]:
    env = gym.make(problem_id(SLUG, "cute"), device="simulator")
    yield env
    env.close()


@pytest.mark.parametrize("dsl", ["cute", "tirx"])
def test_the_script_meets_every_kind_of_answer(dsl: str) -> None:
    text = io.StringIO()
    env = gym.make(problem_id(SLUG, dsl), device="simulator")
    episode = scripted.play(env, scripted.learning(SLUG, dsl), Console(file=text, width=200))
    stages = [turn.stage for turn in episode.turns if turn.stage]
    assert stages == [Stage.REJECTED, Stage.COMPILE_ERROR, Stage.HOST_ERROR, Stage.INCORRECT, Stage.PASSED]
    env.close()
    assert episode.passed, text.getvalue()
    assert episode.skill == scripted.SKILL
    rewards = [turn.reward for turn in episode.turns]
    assert rewards[4] > 0
    assert rewards[:4] == [0.0] * 4
    assert sum(rewards) == pytest.approx(episode.result.score)

    syntax, compiling, torch, wrong, right = (turn.feedback for turn in episode.turns[:5])
    assert "SyntaxError" in syntax
    assert "rsqrtf" in compiling
    assert "aten.rsqrt" in torch
    assert "y = torch.rsqrt(hidden_states)" in torch
    assert "got" in wrong
    assert "want" in wrong
    assert "estimate" in right
    assert "UNEXPECTED" not in text.getvalue()
    for feedback in (syntax, compiling, torch, wrong, right):
        assert "mkb_env" not in feedback, "an agent sees none of our frames"


def test_the_verdict_is_in_the_info(env: gym.Env) -> None:
    env.reset()
    observation, reward, terminated, truncated, info = env.step(Submit(scripted.kernel(SLUG, "cute")))
    verdict = info["verdict"]
    assert verdict.passed
    assert verdict.simulated
    assert (verdict.problem, verdict.dsl, verdict.workload) == (SLUG, "cute", "small")
    assert observation["last_speedup"] == verdict.speedup == reward
    assert (terminated, truncated) == (False, False)
    assert info["verdict_dict"]["plan_sha256"] == verdict.plan_sha256 != ""
    *_, info = env.step(Finish())
    assert [(v.workload, v.passed) for v in info["result"].verdicts] == [("small", True), ("heldout", True)]
    seeds = {verdict.seeds_sha256, *(v.seeds_sha256 for v in info["result"].verdicts)}
    assert len(seeds) == 3, "every judging draws fresh seeds"


def test_a_kernel_for_one_shape_only_does_not_survive_the_final_judging() -> None:
    env = gym.make(problem_id(SLUG, "cute"), device="simulator")
    env.reset()
    overfitted = scripted.edited(scripted.kernel(SLUG, "cute"), "grid=[cute.size(x, mode=[0]), 1, 1]", "grid=[9, 1, 1]")
    _, gain, *_ = env.step(Submit(overfitted))
    observation, correction, terminated, _, info = env.step(Finish())
    assert gain > 0
    assert (terminated, info["result"].score, gain + correction) == (True, 0.0, 0.0)
    assert "held-out shapes" in observation["feedback"]
    assert "The final judging found:\nlaunch_error: heldout shape " in observation["feedback"]
