"""Budget, rewards, endings and skills: an episode's bookkeeping, with verdicts from a table."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import TimeLimit
from table_judge import TableJudge, verdict

from mkb_env.env import Finish, KernelEnv, Submit, WriteSkill
from mkb_env.judge.verdict import Stage
from mkb_env.legality.rules import CANARY
from mkb_env.problems import catalog

SLUG = "rmsnorm_h128_qwen3_30b_bf16"
ANSWERS = {
    "slow": [verdict(Stage.PASSED, 0.5)],
    "fast": [verdict(Stage.PASSED, 2.0)],
    "lucky": [verdict(Stage.PASSED, 4.0), verdict(Stage.PASSED, 3.0)],
    "fragile": [verdict(Stage.PASSED, 4.0), verdict(Stage.INCORRECT)],
    "narrow": [verdict(Stage.PASSED, 4.0), verdict(Stage.PASSED, 4.0), verdict(Stage.INCORRECT)],
    "unlucky": [verdict(Stage.PASSED, 4.0), verdict(Stage.INFRA_ERROR)],
    "evasive": [verdict(Stage.PASSED, 4.0), verdict(Stage.INFRA_ERROR), verdict(Stage.UNSUPPORTED)],
    "wrong": [verdict(Stage.INCORRECT)],
    "hangs": [verdict(Stage.TIMEOUT)],
    "exotic": [verdict(Stage.UNSUPPORTED)],
    "broken": [verdict(Stage.INFRA_ERROR)],
}


def make(**arguments: Any) -> KernelEnv:
    return KernelEnv(SLUG, dsl="cute", judge=TableJudge(ANSWERS), **arguments)


def play(env: KernelEnv, *sources: str) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Hand in the sources, then finish; rewards, last observation and info."""
    observation, info = env.reset()
    rewards = []
    for action in [*map(Submit, sources), Finish()]:
        observation, reward, terminated, _, info = env.step(action)
        assert observation in env.observation_space
        rewards.append(reward)
        if terminated:
            break
    return rewards, observation, info


@pytest.mark.parametrize(
    ("sources", "rewards"),
    [
        ((), [0.0]),
        (("wrong",), [0.0, 0.0]),
        (("slow", "fast"), [0.5, 1.5, 0.0]),
        (("fast", "slow"), [2.0, 0.0, 0.0]),
        (("slow", "lucky"), [0.5, 3.5, -1.0]),
        (("fast", "fragile"), [2.0, 2.0, -4.0]),
        (("narrow",), [4.0, -4.0]),
        (("evasive",), [4.0, -4.0]),
        (("unlucky",), [4.0, 0.0]),
    ],
)
def test_gains_add_up_to_the_result(sources: tuple[str, ...], rewards: list[float]) -> None:
    got, _, info = play(make(), *sources)
    assert got == rewards
    assert sum(got) == info["result"].score


def test_best_submission_is_judged_again_on_the_timed_and_the_held_out_workload() -> None:
    env = make(workload="small")
    _, _, info = play(env, "slow", "fast", "wrong")
    assert env.judge.calls[3:] == [("fast", "small", True), ("fast", "heldout", False)]
    assert info["result"].confirmed
    assert info["result"].score == 2.0
    assert [v.passed for v in info["result"].verdicts] == [True, True]


def test_final_judging_that_fails_on_our_side_keeps_the_score_but_says_so() -> None:
    _, observation, info = play(make(), "unlucky")
    assert info["result"].score == 4.0
    assert not info["result"].confirmed
    assert "unconfirmed" in observation["feedback"]


@pytest.mark.parametrize(("reward", "expected"), [("score", [0.0, 2.0, 0.5, 0.0]), ("sparse", [0.0, 0.0, 0.0, 2.0])])
def test_other_rewards(reward: Any, expected: list[float]) -> None:
    assert play(make(reward=reward), "wrong", "fast", "slow")[0] == expected


def test_last_submission_terminates() -> None:
    env = make(max_submissions=2)
    env.reset()
    observation, _, terminated, truncated, _ = env.step(Submit("wrong"))
    assert (observation["remaining_submissions"], terminated, truncated) == (1, False, False)
    observation, reward, terminated, truncated, info = env.step(Submit("fast"))
    assert (observation["remaining_submissions"], terminated, truncated) == (0, True, False)
    assert reward == info["result"].score == 2.0
    assert "The episode is over" in observation["feedback"]


@pytest.mark.parametrize("source", ["exotic", "broken"])
def test_what_is_not_the_agents_fault_costs_nothing(source: str) -> None:
    env = make(max_submissions=1)
    env.reset()
    observation, _, terminated, _, _ = env.step(Submit(source))
    assert observation["remaining_submissions"] == 1
    assert not terminated
    assert "not the submission's fault" in observation["feedback"]


def test_wall_clock_truncates_without_judging_what_comes_too_late() -> None:
    env = make(max_seconds=1e-6)
    env.reset()
    observation, reward, terminated, truncated, info = env.step(Submit("fast"))
    assert (terminated, truncated, reward) == (False, True, 0.0)
    assert env.judge.calls == []
    assert "over before this action came" in observation["feedback"]
    assert info["result"].score == 0.0
    with pytest.raises(ResetNeeded):
        env.step(Finish())


@pytest.mark.parametrize(("on_timeout", "ends"), [("continue", False), ("end", True)])
def test_on_timeout(on_timeout: Any, ends: bool) -> None:
    env = make(on_timeout=on_timeout)
    env.reset()
    observation, _, terminated, truncated, _ = env.step(Submit("hangs"))
    assert (terminated, truncated) == (ends, False)
    assert observation["stage"] == "timeout"


def test_stepping_before_a_reset_and_after_the_end_raises() -> None:
    env = make()
    with pytest.raises(ResetNeeded):
        env.step(Finish())
    play(env)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(Finish())
    env.reset()
    env.step(Finish())


def test_observation_follows_the_verdicts() -> None:
    env = make()
    observation, info = env.reset()
    assert observation["stage"] == ""
    assert observation["task"].startswith("RMSNorm over rows of 128")
    assert "solve(hidden_states, weight) -> y" in observation["task"]
    assert "4099" not in observation["task"], "held-out shapes are not shown"
    assert "CuTe DSL" in observation["contract"]
    assert "verdict" not in info
    env.step(Submit("fast"))
    observation, _, _, _, info = env.step(Submit("wrong"))
    assert observation["stage"] == "incorrect"
    assert (observation["last_speedup"], observation["best_speedup"]) == (0.0, 2.0)
    assert info["verdict"].stage is Stage.INCORRECT
    assert info["verdict_dict"]["stage"] == "incorrect"
    assert "timing" not in info["verdict_dict"]
    assert info["submissions"] == 2


def test_own_kernels_are_refused_before_the_judge_sees_them() -> None:
    env = make()
    env.reset()
    observation, _, _, _, info = env.step(Submit(f'"""{CANARY} 1234"""'))
    assert info["verdict"].stage is Stage.REJECTED
    assert "[own]" in observation["feedback"]
    assert observation["remaining_submissions"] == 9


def test_skill_is_stored_refused_and_handed_on() -> None:
    env = make(skill="Old note.")
    observation, _ = env.reset()
    assert observation["skill"] == "Old note."
    observation, reward, terminated, _, info = env.step(WriteSkill("# Heading\nText."))
    assert observation["skill"] == "Old note."
    assert "refused" in observation["feedback"]
    assert "headings" in observation["feedback"]
    assert (reward, terminated, "verdict" in info) == (0.0, False, False)
    observation, *_ = env.step(WriteSkill("Keep the row in registers."))
    assert observation["skill"] == "Keep the row in registers."
    assert observation["remaining_submissions"] == 10
    assert env.reset()[0]["skill"] == "Old note."
    assert env.reset(options={"skill": "From before."})[0]["skill"] == "From before."


def test_family_draws_by_seed_or_by_option() -> None:
    env = KernelEnv(family="mlp_norm", dsl="tirx", judge=TableJudge({}))
    members = {slug for slug, ref in catalog().items() if ref.family == "mlp_norm"}
    drawn = [env.reset(seed=seed)[1]["problem"] for seed in range(200)]
    assert set(drawn) == members
    assert drawn == [env.reset(seed=seed)[1]["problem"] for seed in range(200)]
    assert env.reset(options={"problem": SLUG})[1]["problem"] == SLUG
    with pytest.raises(ValueError, match="this environment's problems are"):
        env.reset(options={"problem": "gqa_paged_decode_h32_kv8_d128_ps1_bf16"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "loss"}, "reward must be one of"),
        ({"on_timeout": "cry"}, "on_timeout must be one of"),
        ({"render_mode": "rgb_array"}, "render_mode must be one of"),
        ({"workload": "heldout"}, "workload must be one of"),
        ({"max_submissions": 0}, "must be positive"),
        ({"max_seconds": 0}, "must be positive"),
        ({"family": "mlp_norm"}, "not both"),
        ({"max_seconds": float("nan")}, "must be positive"),
        ({"skill": "\ud800"}, "a skill must be text"),
    ],
)
def test_misuse_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"judge": "x"}, "judge must be an mkb_env.Judge or None, got 'x'"),
        ({"max_seconds": "60"}, "max_seconds must be a number, got '60'"),
        ({"max_submissions": "3"}, "max_submissions must be an integer, got '3'"),
        ({"max_submissions": 2.5}, "max_submissions must be an integer, got 2.5"),
        ({"max_submissions": True}, "max_submissions must be an integer, got True"),
    ],
)
def test_wrong_types_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        KernelEnv(SLUG, dsl="cute", **arguments)


def test_a_gpu_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r'device "cuda:99" cannot be used: .* use --device simulator'):
        KernelEnv(SLUG, dsl="cute", device="cuda:99")


@pytest.mark.parametrize(
    ("source", "stage", "shown"),
    [
        ("fragile", "incorrect", True),
        ("narrow", "incorrect", True),
        ("unlucky", "infra_error", True),
        ("fast", "", False),
    ],
)
def test_the_final_judgings_own_words_are_shown(source: str, stage: str, shown: bool) -> None:
    feedback = play(make(), source)[1]["feedback"]
    assert (f"The final judging found:\n{stage}: this is {stage}" in feedback) == shown


def test_an_injected_skill_is_not_held_to_the_rules_of_skills() -> None:
    env = make()
    code = "# Heading\n```python\nx = 1\n```"
    assert env.reset(options={"skill": code})[0]["skill"] == code
    assert "refused" in env.step(WriteSkill(code))[0]["feedback"]


@pytest.mark.parametrize("action", [None, "text", {"kind": 7, "text": ""}, {"kind": 0}, {"kind": 0, "text": b""}])
def test_bad_action_raises_and_says_what_an_action_is(action: Any) -> None:
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="action"):
        env.step(action)


def test_unknown_option_raises() -> None:
    with pytest.raises(ValueError, match="'problem' and 'skill'"):
        make().reset(options={"sed": 1})


def test_rendering(capsys: pytest.CaptureFixture[str]) -> None:
    env = make(render_mode="ansi")
    play(env, "fast")
    text = env.render()
    assert isinstance(text, str)
    assert "The episode is over" in text
    assert capsys.readouterr().out == ""
    env = make(render_mode="human")
    play(env, "fast")
    assert env.render() is None
    assert "this is passed" in capsys.readouterr().out


def test_a_shared_judge_is_left_open() -> None:
    env = make()
    env.close()
    env.close()
    assert not env.judge.closed


def test_a_time_limit_from_outside_leaves_no_result() -> None:
    env = TimeLimit(make(), max_episode_steps=1)
    env.reset()
    *_, terminated, truncated, info = env.step(Submit("fast"))
    assert (terminated, truncated, "result" in info) == (False, True, False)
