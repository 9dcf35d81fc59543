"""The environment: an agent hands in kernel sources and notes, and reads verdicts."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import gymnasium as gym
import msgspec
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from mkb_env.dsl import get
from mkb_env.feedback import render
from mkb_env.judge.verdict import Stage, Verdict
from mkb_env.legality import refuse_baseline, refuse_skill
from mkb_env.legality.rules import MAX_SOURCE_BYTES
from mkb_env.legality.skill import MAX_SKILL_CHARACTERS
from mkb_env.problems import FAMILIES, catalog, find
from mkb_env.recorder.protocol import Failure
from mkb_env.spaces import Utf8, printable
from mkb_env.task import TIMED_WORKLOADS, brief

if TYPE_CHECKING:
    from mkb_env.judge.client import Judge

MAX_TEXT_BYTES = 32_768
"""Of each text in an observation, except the skill."""
MAX_SKILL_BYTES = 4 * MAX_SKILL_CHARACTERS
MAX_SPEEDUP = 1e6
"""Bound of the speed-ups in an observation."""

RewardKind = Literal["gain", "score", "sparse"]
OnTimeout = Literal["continue", "end"]
Action = dict[str, Any]
Observation = dict[str, Any]


class Kind(IntEnum):
    """What an action does."""

    SUBMIT = 0
    WRITE_SKILL = 1
    FINISH = 2


def Submit(source: str) -> Action:
    """The action that has ``source`` judged. Costs one submission."""
    return {"kind": Kind.SUBMIT, "text": source}


def WriteSkill(text: str) -> Action:
    """The action that stores ``text`` as the episode's skill. Costs no submission."""
    return {"kind": Kind.WRITE_SKILL, "text": text}


def Finish() -> Action:
    """The action that ends the episode."""
    return {"kind": Kind.FINISH, "text": ""}


@dataclass(frozen=True)
class Result:
    """What an episode came to: ``score`` is the final speed-up, 0 if nothing correct was handed in."""

    score: float
    confirmed: bool
    """True only if the best submission passed once more, on fresh seeds and on held-out shapes. False with a score of
    0: nothing passed, or it failed there. False with another score: the final judging could not be completed."""
    note: str
    verdicts: tuple[Verdict, ...] = ()
    """Of the final judging: the timed workload, then the held-out shapes."""

    @property
    def complaint(self) -> Verdict | None:
        """The final judging's verdict that decided against the submission, or that says why it was not completed."""
        not_passed = [verdict for verdict in self.verdicts if not verdict.passed]
        return next((v for v in not_passed if v.stage is not Stage.INFRA_ERROR), not_passed[0] if not_passed else None)


class KernelEnv(gym.Env[Observation, Action]):
    """Write a GPU kernel in one DSL for one problem, within a budget of judged submissions.

    Action: a dict with ``kind`` (:class:`Kind`) and ``text``; :func:`Submit`, :func:`WriteSkill` and :func:`Finish`
    make one. Observation: a dict of texts (``task``, ``contract``, ``skill``, ``feedback``: the answer to the last
    action, ``stage``: of the last submission, empty before the first) and numbers (``remaining_submissions``,
    ``remaining_seconds``, ``last_speedup``, ``best_speedup``; a speed-up is over the eager reference and 0 unless the
    submission passed). ``info["verdict"]`` is the :class:`Verdict` of this step's submission and
    ``info["verdict_dict"]`` the same as a dict without the fields that are None; ``info["result"]`` is the
    :class:`Result` in the step that ends the episode.

    ``terminated``: after a finish, or when the submissions are used up. ``truncated``: when ``max_seconds`` of wall
    clock have gone by; an action that comes later than that is not judged. Either way the best correct submission is
    judged once more on fresh seeds and on held-out shapes, which gives the result. Submissions that end in
    ``unsupported`` or ``infra_error`` are not the agent's fault and cost nothing. Stepping after the end raises
    ``gymnasium.error.ResetNeeded``. A vector environment's autoreset ignores the action of the step after an end.

    Args:
        problem: slug of the only problem. Without it, each reset draws one (``np_random``) of ``family``, or of all.
        dsl: ``cute`` or ``tirx``.
        family: folder name of a family of problems, for example ``attention``.
        device: ``auto``, ``simulator``, ``cuda``, ``cuda:0`` or ``ray`` (a cluster): where submissions run.
        workload: ``small`` or ``full``; None: ``small`` in the simulator, ``full`` on a GPU.
        max_submissions: judged submissions in an episode.
        max_seconds: wall clock of an episode.
        skill: a note that each episode starts with; ``reset(options={"skill": text})`` overrides it. Whoever makes the
            environment may inject any text: only a note that the agent writes is held to the rules for skills.
        reward: ``gain``: the gain in the episode's best score, corrected at the end so that the rewards add up to the
            result's score; ``score``: each submission's own speed-up; ``sparse``: the result's score at the end.
        render_mode: ``ansi`` (``render`` returns the last exchange) or ``human`` (it is printed).
        on_timeout: ``end``: a submission that runs into a time limit ends the episode.
        judge: shared by the caller, who closes it; else the environment has its own.

    Raises:
        ValueError: if an argument is none of the above, or ``device`` names a GPU that is not there.
        TypeError: if a number is none, or ``judge`` is no judge.
    """

    metadata = {"render_modes": ["ansi", "human"], "render_fps": 1}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        problem: str | None = None,
        *,
        dsl: str,
        family: str | None = None,
        device: str = "auto",
        workload: str | None = None,
        max_submissions: int = 10,
        max_seconds: float = 2400.0,
        skill: str | None = None,
        reward: RewardKind = "gain",
        render_mode: str | None = None,
        on_timeout: OnTimeout = "continue",
        judge: Judge | None = None,
    ) -> None:
        _choice("reward", reward, get_args(RewardKind))
        _choice("on_timeout", on_timeout, get_args(OnTimeout))
        _choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        _choice("workload", workload, (None, *TIMED_WORKLOADS))
        _number("max_submissions", max_submissions, Integral, "an integer")
        _number("max_seconds", max_seconds, Real, "a number")
        if judge is not None and not callable(getattr(judge, "judge", None)):
            raise TypeError(f"judge must be an mkb_env.Judge or None, got {judge!r}")
        if max_submissions < 1 or not max_seconds > 0:
            raise ValueError(
                f"max_submissions and max_seconds must be positive, got {max_submissions} and {max_seconds}"
            )
        self.contract, self.dsl = get(dsl).CONTRACT, dsl
        self.pool = _pool(problem, family)
        self.workload, self.reward_kind, self.on_timeout = workload, reward, on_timeout
        self.max_submissions, self.max_seconds = int(max_submissions), float(max_seconds)
        self.start_skill = _checked_skill(skill or "")
        self.render_mode = render_mode
        self._owns_judge = judge is None
        if judge is None:
            from mkb_env.judge.client import Judge

            judge = Judge(device)
            if device.startswith("cuda"):  # said now, not as an infra_error after the first submission
                from mkb_env.devices.cuda import require

                require(device)
        self.judge = judge
        self.action_space = spaces.Dict({"kind": spaces.Discrete(len(Kind)), "text": Utf8(MAX_SOURCE_BYTES)})
        self.observation_space = spaces.Dict(
            {
                **{name: Utf8(MAX_TEXT_BYTES) for name in ("task", "contract", "feedback")},
                "skill": Utf8(MAX_SKILL_BYTES),
                "stage": Utf8(max(len(stage.value) for stage in Stage)),
                "remaining_submissions": spaces.Discrete(self.max_submissions + 1),
                "remaining_seconds": spaces.Box(0.0, self.max_seconds, (), np.float64),
                "last_speedup": spaces.Box(0.0, MAX_SPEEDUP, (), np.float64),
                "best_speedup": spaces.Box(0.0, MAX_SPEEDUP, (), np.float64),
            }
        )
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: of the choice of the problem; the seeds that submissions are judged with are nobody's to choose.
            options: ``problem``: a slug among this environment's problems; ``skill``: a note to start with.

        Raises:
            ValueError: if an option is unknown or its value does not fit.
        """
        super().reset(seed=seed)
        options = options or {}
        unknown = set(options) - {"problem", "skill"}
        if unknown:
            raise ValueError(f"options may hold 'problem' and 'skill', got {', '.join(sorted(map(repr, unknown)))}")
        chosen = options.get("problem")
        if chosen is None:
            chosen = self.pool[int(self.np_random.integers(len(self.pool)))]
        elif chosen not in self.pool:
            raise ValueError(f"this environment's problems are {', '.join(self.pool)}; got {chosen!r}")
        self.problem: str = chosen
        self.skill = _checked_skill(options.get("skill", self.start_skill))
        self._task = brief(self.problem).task
        self._over = False
        self._used = 0
        self._paid = 0.0
        self._best: tuple[float, str] | None = None
        self._last: Verdict | None = None
        self._started = time.monotonic()
        self._feedback = "Nothing was handed in yet."
        if self.render_mode == "human":
            print(self._text())
        return self._observation(), self._info()

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Judge a source, store a note, or finish.

        Raises:
            ResetNeeded: if the episode is over, or none was started.
            ValueError: if the action is not a dict with a known ``kind`` and a string as ``text``. A text outside the
                action space is no error but a rejected submission, or a refused note.
        """
        if self._over:
            raise ResetNeeded("the episode is over (or was never started): call reset() before the next step()")
        kind, text = _parts(action)
        verdict: Verdict | None = None
        result: Result | None = None
        truncated = self._remaining_seconds() <= 0
        terminated = False
        if truncated:
            self._feedback = f"The {self.max_seconds:g} seconds of this episode were over before this action came."
        elif kind is Kind.SUBMIT:
            verdict = self._submit(text)
            timed_out = verdict.stage is Stage.TIMEOUT and self.on_timeout == "end"
            terminated = timed_out or self._used >= self.max_submissions
            truncated = not terminated and self._remaining_seconds() <= 0
        elif kind is Kind.WRITE_SKILL:
            self._write_skill(text)
        else:
            terminated = True
            self._feedback = "Finished."
        if terminated or truncated:
            self._over = True
            result = self._final()
            self._feedback += f"\nThe episode is over. {result.note}"
            if found := result.complaint:
                self._feedback += f"\nThe final judging found:\n{render(found)}"
        reward = self._reward(verdict, result)
        if self.render_mode == "human":
            print(self._text())
        return self._observation(), reward, terminated, truncated, self._info(verdict, result)

    def render(self) -> str | None:
        """The last exchange as text if ``render_mode`` is ``ansi``; ``human`` has printed it already."""
        return self._text() if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the judge, unless it is the caller's."""
        if self._owns_judge:
            self.judge.close()

    def _submit(self, source: str) -> Verdict:
        refused = refuse_baseline(source)
        if refused:
            verdict = self._rejected(source, refused)
        else:
            verdict = self.judge.judge(source, self.problem, self.dsl, self.workload)
        self._last = verdict
        if verdict.stage.costs_step:
            self._used += 1
        if verdict.passed and (self._best is None or verdict.speedup > self._best[0]):
            self._best = (verdict.speedup, source)
        self._feedback = render(verdict)
        if not verdict.stage.costs_step:
            self._feedback += "\nThis is not the submission's fault; it did not cost a submission."
        return verdict

    def _rejected(self, source: str, failure: Failure) -> Verdict:
        return Verdict(
            stage=Stage.REJECTED,
            problem=self.problem,
            dsl=self.dsl,
            workload=self.workload or self.judge.default_workload,
            message=failure.message,
            error_class=failure.error_class,
            location=failure.location,
            source_sha256=hashlib.sha256(source.encode(errors="replace")).hexdigest(),
        )

    def _write_skill(self, text: str) -> None:
        reason = refuse_skill(text)
        if reason is None and text not in Utf8(MAX_SKILL_BYTES):
            reason = "A skill is text: no NUL, no half of a surrogate pair."
        if reason is None:
            self.skill = text
        self._feedback = f"The skill was refused. {reason}" if reason else "The skill is stored."

    def _final(self) -> Result:
        """Judge the best submission once more: timed on fresh seeds, then for correctness on held-out shapes."""
        if self._best is None:
            return Result(0.0, False, "No submission passed: the result is 0.")
        best, source = self._best
        timed = self.judge.judge(source, self.problem, self.dsl, self.workload)
        held_out = self.judge.judge(source, self.problem, self.dsl, "heldout", timing=False)
        if held_out.stage is Stage.INFRA_ERROR:  # once more, since it is not the agent's fault
            held_out = self.judge.judge(source, self.problem, self.dsl, "heldout", timing=False)
        verdicts = (timed, held_out)
        score = timed.speedup if timed.passed else best
        result = Result(score, False, "", verdicts)
        found = result.complaint
        if found is None:
            note = f"The best submission passed again, on fresh seeds and held-out shapes: the result is {score:.3f}."
        elif found.stage is not Stage.INFRA_ERROR:  # unsupported too: the timed shape ran, so it chose to differ here
            where = "held-out shapes" if found is held_out else "fresh seeds"
            note = f"The best submission did not pass again on {where} ({found.stage.value}): the result is 0."
            score = 0.0
        else:
            reason = found.stage.value
            note = f"The final judging could not be completed ({reason}); the result is {score:.3f}, unconfirmed."
        return replace(result, score=score, confirmed=found is None, note=note)

    def _reward(self, verdict: Verdict | None, result: Result | None) -> float:
        if self.reward_kind == "score":
            return verdict.speedup if verdict else 0.0
        if self.reward_kind == "sparse":
            return result.score if result else 0.0
        total = result.score if result else self._best_speedup()
        gain = total - self._paid
        self._paid = total
        return gain

    def _best_speedup(self) -> float:
        return self._best[0] if self._best else 0.0

    def _remaining_seconds(self) -> float:
        return max(0.0, self.max_seconds - (time.monotonic() - self._started))

    def _observation(self) -> Observation:
        last = self._last
        return {
            "task": printable(self._task, MAX_TEXT_BYTES),
            "contract": printable(self.contract, MAX_TEXT_BYTES),
            "skill": self.skill,
            "feedback": printable(self._feedback, MAX_TEXT_BYTES),
            "stage": last.stage.value if last else "",
            "remaining_submissions": np.int64(self.max_submissions - self._used),
            "remaining_seconds": np.array(self._remaining_seconds()),
            "last_speedup": np.array(min(last.speedup if last else 0.0, MAX_SPEEDUP)),
            "best_speedup": np.array(min(self._best_speedup(), MAX_SPEEDUP)),
        }

    def _info(self, verdict: Verdict | None = None, result: Result | None = None) -> dict[str, Any]:
        info: dict[str, Any] = {"problem": self.problem, "dsl": self.dsl, "submissions": self._used}
        if verdict:
            # A vector environment batches dicts key by key, and cannot where a value is None in one and not in another.
            info["verdict"], info["verdict_dict"] = verdict, _without_none(msgspec.to_builtins(verdict))
        if result:
            info["result"] = result
        return info

    def _text(self) -> str:
        left = f"{self.max_submissions - self._used} submissions and {self._remaining_seconds():.0f} s left"
        return f"[{self.problem}, {self.dsl}; {left}]\n{self._feedback}"


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _number(name: str, value: object, kind: type, words: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} must be {words}, got {value!r}")


def _pool(problem: str | None, family: str | None) -> tuple[str, ...]:
    """The slugs that a reset draws from."""
    if problem is not None and family is not None:
        raise ValueError(f"give a problem or a family, not both (got {problem!r} and {family!r})")
    if problem is not None:
        return (find(problem).slug,)
    if family is not None:
        _choice("family", family, tuple(FAMILIES))
    pool = tuple(sorted(slug for slug, ref in catalog().items() if family in (None, ref.family)))
    if not pool:
        raise ValueError(f"the family {family!r} has no problem yet")
    return pool


def _checked_skill(text: str) -> str:
    if text not in Utf8(MAX_SKILL_BYTES):
        raise ValueError(
            f"a skill must be text of at most {MAX_SKILL_BYTES} bytes of UTF-8, without NUL and surrogates"
        )
    return text


def _parts(action: Action) -> tuple[Kind, str]:
    try:
        kind, text = Kind(int(action["kind"])), action["text"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"an action is a dict with 'kind' (0 submit, 1 write_skill, 2 finish) and 'text', got {action!r:.200}"
        ) from error
    if not isinstance(text, str):
        raise ValueError(f"an action's 'text' is a string, got {type(text).__name__}")
    return kind, str(text)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
