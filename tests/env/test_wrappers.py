"""Plain replies of a language model become actions."""

from __future__ import annotations

from typing import Any

import pytest
from table_judge import TableJudge, verdict

from mkb_env.env import Finish, KernelEnv, Submit, WriteSkill
from mkb_env.judge.verdict import Stage
from mkb_env.wrappers import TextAction, read_reply

SOURCE = "import cutlass\n\ndef solve(x):\n    return x\n"


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (f"Here:\n```python\n{SOURCE}```\nDone.", Submit(SOURCE)),
        (f"```\n{SOURCE}```", Submit(SOURCE)),
        (f"~~~py\n{SOURCE}~~~\n", Submit(SOURCE)),
        (f"````python\n{SOURCE}# ```\n````", Submit(SOURCE + "# ```\n")),
        (f"```python\n{SOURCE}```\nBetter:\n```python\n{SOURCE}# 2\n```", Submit(SOURCE + "# 2\n")),
        (f"```python\n{SOURCE}```\nI checked it with\n```bash\nls\n```", Submit(SOURCE)),
        (f"```python\r\n{SOURCE}```\r\n", Submit(SOURCE)),
        (SOURCE, Submit(SOURCE)),
        ("```python\nsolve = make()\n```", Submit("solve = make()\n")),
        (f"```python\n{SOURCE}```\nFINISH", Submit(SOURCE)),
        ("```skill\nUse registers.\n```", WriteSkill("Use registers.")),
        ("I learnt this.\nSKILL: Use registers.\nAnd warps.\nFINISH", WriteSkill("Use registers.\nAnd warps.")),
        ("All done.\nFINISH\n", Finish()),
        ("Finish.", None),
        ("I would solve( it so.", None),
        (f"```python\n{SOURCE}", None),
        ("", None),
    ],
)
def test_replies(reply: str, action: Any) -> None:
    assert read_reply(reply) == action


def make(answers: dict[str, Any]) -> TextAction:
    return TextAction(KernelEnv("rmsnorm_h128_qwen3_30b_bf16", dsl="cute", judge=TableJudge(answers)))


def test_a_reply_is_played() -> None:
    env = make({SOURCE: [verdict(Stage.PASSED, 2.0)]})
    env.reset()
    observation, reward, terminated, _, info = env.step(f"```python\n{SOURCE}```")
    assert (observation["stage"], reward, info["action"]) == ("passed", 2.0, "submit")
    _, _, terminated, _, info = env.step("FINISH")
    assert (terminated, info["action"], info["result"].score) == (True, "finish", 2.0)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I give up", "It has no fenced code block."),
        ("", "It has no fenced code block."),
        ("I shall finish it tomorrow", "It has no fenced code block."),
        ("```python\ndef solve(x):\n", "The last code block is not closed."),
        ("```bash\nls\n```\n```python\ndef solve(x):\n", "The last code block is not closed."),
        ("```python\ndef main(x):\n    pass\n```", "The code block does not define solve"),
        ("```python\nprint(1)\n```\nI FINISH here", "The code block does not define solve"),
        ("I want to FINISH now", "FINISH must stand alone"),
        ("**Finish**", "FINISH must stand alone"),
    ],
)
def test_a_reply_without_an_action_costs_a_submission_and_says_so(reply: str, reason: str) -> None:
    env = make({reply: [verdict(Stage.REJECTED)]})
    env.reset()
    observation, _, _, _, info = env.step(reply)
    assert observation["feedback"].startswith("NO ACTION WAS FOUND IN THE REPLY")
    assert reason in observation["feedback"]
    assert "fenced code block" in observation["feedback"]
    assert observation["remaining_submissions"] == 9
    assert info["action"] == "none"
    assert observation in env.observation_space


def test_only_text_is_taken() -> None:
    env = make({})
    env.reset()
    with pytest.raises(ValueError, match="as a string"):
        env.step(Submit(SOURCE))
