"""An agent that plays from a script: it makes each kind of mistake once, mends it, notes a skill, and moves on with it.

It shows what every kind of answer looks like, with no model behind it. The right kernels are the readable ones in
``demo/``; the faulty submissions are those with one edit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
from rich.console import Console
from rich.table import Table

from mkb_env.env import Action, Finish, Kind, Observation, Result, Submit, WriteSkill
from mkb_env.judge.verdict import Stage
from mkb_env.registration import problem_id

DEMO = Path(__file__).parent / "demo"
KERNELS = {
    "fused_add_rmsnorm_h4096_llama31_8b_bf16": "add_rmsnorm",
    "rmsnorm_h128_qwen3_30b_bf16": "rmsnorm",
}
"""Slug -> stem of its kernels' files in ``demo/``."""

ARMS = (
    ("cute", "tirx", "fused_add_rmsnorm_h4096_llama31_8b_bf16"),
    ("tirx", "cute", "rmsnorm_h128_qwen3_30b_bf16"),
)
"""Source DSL, target DSL, problem."""

INTERRUPTED = 130
"""Exit code: what shells make of a process that SIGINT ended."""
MIN_WIDTH = 140
"""Columns that the summary needs."""

SKILL = """\
Give each row to one block, so that its sum never leaves the block. Let neighbouring threads read neighbouring
elements. Accumulate the squares in float32 whatever the input's type, and add the small constant before the reciprocal
square root, not after it. Combine the threads' partial sums by shuffles or in shared memory, with a barrier between
every write and the read of another thread. Round to the output's type once, at the very end. Leave all arithmetic to
the kernel: host code only allocates the output, compiles once and launches.
"""


@dataclass(frozen=True)
class Move:
    """One action, and the stage that a submission is expected to end in."""

    label: str
    action: Action
    expected: Stage | None = None


@dataclass
class Turn:
    """One move and its answer."""

    move: Move
    feedback: str
    stage: Stage | None
    reward: float
    seconds: float

    @property
    def as_expected(self) -> bool:
        return self.stage is self.move.expected


@dataclass
class Episode:
    """One episode played to its end."""

    problem: str
    dsl: str
    given_skill: bool
    turns: list[Turn] = field(default_factory=list)
    result: Result | None = None
    skill: str = ""
    """The note at its end."""

    @property
    def passed(self) -> bool:
        """Everything went as the script says, and the final judging passed."""
        return all(turn.as_expected for turn in self.turns) and self.result is not None and self.result.confirmed


def kernel(slug: str, dsl: str) -> str:
    """The right kernel for a problem. Raises KeyError if the script has none."""
    return (DEMO / f"{KERNELS[slug]}_{dsl}.py").read_text(encoding="utf-8")


def edited(source: str, old: str, new: str) -> str:
    """``source`` with ``old``, which must occur exactly once, replaced. Raises ValueError otherwise."""
    if source.count(old) != 1:
        raise ValueError(f"{old!r} must occur once in the kernel, it occurs {source.count(old)} times")
    return source.replace(old, new)


def learning(slug: str, dsl: str) -> list[Move]:
    """The source episode: every kind of mistake, then the right kernel and a skill."""
    right = kernel(slug, dsl)
    epsilon = next(line for line in right.splitlines() if line.startswith("EPS = "))
    refused = edited(right, "y = torch.empty_like(hidden_states)", "y = torch.rsqrt(hidden_states)")
    return [
        Move("a bracket too few", Submit(edited(right, "    return y", "    return (y")), Stage.REJECTED),
        Move("a function that the DSL lacks", Submit(edited(right, ".rsqrt(", ".rsqrtf(")), Stage.COMPILE_ERROR),
        Move("torch does some of the work", Submit(refused), Stage.HOST_ERROR),
        Move("a wrong constant", Submit(edited(right, epsilon, "EPS = 1.0")), Stage.INCORRECT),
        Move("the right kernel", Submit(right), Stage.PASSED),
        Move("a skill with code in it", WriteSkill("Write this:\n```python\nx = 1\n```")),
        Move("a skill", WriteSkill(SKILL)),
        Move("finish", Finish()),
    ]


def applying(slug: str, dsl: str) -> list[Move]:
    """The target episode: with the skill at hand, the right kernel at once."""
    return [Move("the right kernel", Submit(kernel(slug, dsl)), Stage.PASSED), Move("finish", Finish())]


def play(
    env: gym.Env[Observation, Action], moves: Iterable[Move], console: Console, skill: str | None = None
) -> Episode:
    """Play ``moves`` and tell ``console`` about each."""
    observation, info = env.reset(options={"skill": skill} if skill else {})
    episode = Episode(info["problem"], info["dsl"], bool(skill))
    console.rule(f"{episode.problem} in {episode.dsl}{', with a skill' if skill else ''}")
    for move in moves:
        started = time.monotonic()
        observation, reward, terminated, truncated, info = env.step(move.action)
        stage = info["verdict"].stage if "verdict" in info else None
        turn = Turn(move, observation["feedback"], stage, float(reward), time.monotonic() - started)
        episode.turns.append(turn)
        _tell(console, turn)
        if terminated or truncated:
            episode.result = info["result"]
            break
    episode.skill = observation["skill"]
    return episode


def _tell(console: Console, turn: Turn) -> None:
    kind = Kind(turn.move.action["kind"]).name.lower()
    console.print(
        f"\n> {kind}: {turn.move.label}   ({turn.seconds:.1f} s, reward {turn.reward:+.3f})",
        style="bold",
        highlight=False,
    )
    for line in turn.feedback.splitlines():
        console.print(f"    {line}", markup=False, highlight=False)
    if not turn.as_expected:
        console.print(f"    UNEXPECTED: the script expects {turn.move.expected}, got {turn.stage}", style="bold red")


def run(device: str, console: Console) -> list[Episode]:
    """Both transfer arms: learn in one DSL, then use the skill in the other, on a problem each."""
    episodes = []
    for source, target, slug in ARMS:
        skill: str | None = None
        for dsl, script in ((source, learning), (target, applying)):
            env = gym.make(problem_id(slug, dsl), device=device)
            try:
                episodes.append(play(env, script(slug, dsl), console, skill))
            finally:
                env.close()
            skill = episodes[-1].skill
    return episodes


def summary(episodes: list[Episode]) -> Table:
    """One row per episode."""
    table = Table(title="Episodes", box=None, padding=(0, 1))
    for column in ("problem", "DSL", "skill", "submissions", "final verdict", "speed-up", "seconds", "device"):
        table.add_column(column, no_wrap=True)
    for episode in episodes:
        result = episode.result
        submissions = sum(turn.stage is not None for turn in episode.turns)
        verdicts = result.verdicts if result else ()
        stage = "passed" if episode.passed else next((v.stage.value for v in verdicts if not v.passed), "not passed")
        simulated = bool(verdicts) and verdicts[0].simulated
        table.add_row(
            episode.problem,
            episode.dsl,
            "yes" if episode.given_skill else "no",
            str(submissions),
            stage,
            f"{result.score:.3f}{' (estimated)' if simulated else ''}" if result else "",
            f"{sum(turn.seconds for turn in episode.turns):.1f}",
            verdicts[0].device if verdicts else "",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Play both arms; 0 if every episode went as the script says and passed, 130 after Ctrl-C, else 1."""
    parser = argparse.ArgumentParser(prog="python -m mkb_env.agents.scripted", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, simulator, cuda, cuda:N or ray (default: auto)")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True, width=max(MIN_WIDTH, Console().width))
    started = time.monotonic()
    try:
        episodes = run(options.device, console)
    except (ValueError, OSError) as error:  # a device that is not there, a runtime folder that cannot be used
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    console.print()
    console.print(summary(episodes))
    passed = sum(episode.passed for episode in episodes)
    console.print(
        f"{passed} of {len(episodes)} verdicts passed, in {time.monotonic() - started:.0f} s.", highlight=False
    )
    return 0 if passed == len(episodes) else 1


if __name__ == "__main__":
    sys.exit(main())
