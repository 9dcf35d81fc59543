"""What the store holds, as typed records. Times are seconds since the epoch (UTC), durations seconds.

A *trial* is one episode of one agent on one problem in one arm. Its *steps* are the actions with their answers, its
*judgments* every verdict that was paid for (a step's own, and those of the final judging), its *calls* what was asked
of a language model. Texts (sources, notes, prompts) are kept once, under their SHA-256.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class State(StrEnum):
    """Where a trial stands."""

    RUNNING = "running"
    """Begun: by a live process, or by one that was ended; then it can be resumed."""
    DONE = "done"
    SKIPPED = "skipped"
    """A transfer whose source trial left no skill: it counts as the base result."""
    FAILED = "failed"
    """The agent raised, or our side failed for good: not a result; run again."""


class TrialKey(msgspec.Struct, frozen=True, order=True):
    """What makes two trials of one experiment the same one."""

    agent: str
    arm: str
    """``solo_cute``, ``solo_tirx``, ``cute2tirx`` or ``tirx2cute``."""
    problem: str
    repetition: int = 0


class Fingerprint(msgspec.Struct, frozen=True):
    """What a trial's result depends on, each part as a digest or version: one that differs makes it stale."""

    problem: str
    """Of the problem's files."""
    judge: str
    """Of the code that records, runs and compares."""
    toolchain: str
    """Versions of Python, torch and the DSL."""
    agent: str
    """Of the agent's prompts, model and parameters."""
    budget: str
    device: str
    """The device's name, and the workload."""
    skill: str = ""
    """Of the note a transfer starts with; empty without one."""
    seed: str = ""

    def differs(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the parts that differ."""
        return tuple(f for f in self.__struct_fields__ if getattr(self, f) != getattr(other, f))


class Trial(msgspec.Struct, frozen=True):
    """One episode, as it stands."""

    id: str
    """A UUID, the same in every store that the trial is merged into."""
    experiment: str
    key: TrialKey
    fingerprint: Fingerprint
    state: State
    dsl: str
    """The target DSL."""
    family: str
    device: str = ""
    simulated: bool = True
    source: str | None = None
    """The trial whose skill this one starts with."""
    skill_given: str = ""
    """SHA-256 of the note that it started with."""
    skill_written: str = ""
    """SHA-256 of the note that it ended with, if the agent wrote one."""
    score: float = 0.0
    """The final speed-up over eager PyTorch; 0 if nothing correct was handed in."""
    low: float = 0.0
    high: float = 0.0
    """The 95 % interval of the final speed-up; equal to the score where it is an estimate."""
    confirmed: bool = False
    note: str = ""
    """How the episode ended, in words; the error of a failed one."""
    submissions: int = 0
    """Those that cost one."""
    started: float = 0.0
    ended: float = 0.0
    elapsed: float = 0.0
    """The trial's own clock: time spent in its agent and in judging, interruptions left out."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    seed: int = 0
    versions: dict[str, str] = {}
    archived: str = ""
    """Why the trial no longer counts; empty while it does."""


class Step(msgspec.Struct, frozen=True):
    """One action and its answer."""

    trial: str
    index: int
    """From 0."""
    kind: str
    """``submit``, ``write_skill`` or ``finish``."""
    text: str
    """SHA-256 of the action's text."""
    feedback: str
    stage: str
    """Of the submission's verdict; empty for other actions."""
    reward: float
    speedup: float
    best: float
    """The best speed-up so far."""
    remaining: int
    """Submissions left."""
    terminated: bool
    truncated: bool
    elapsed: float
    """The trial's clock after the step."""
    at: float


class Judgment(msgspec.Struct, frozen=True):
    """One verdict that was paid for."""

    trial: str
    index: int
    """From 0, in the order in which the trial asked."""
    step: int
    """The step it belongs to."""
    purpose: str
    """``submit``, ``final`` (the best submission on fresh seeds) or ``heldout``."""
    source: str
    """SHA-256 of the source."""
    verdict: str
    """The verdict's JSON (:meth:`mkb_env.judge.verdict.Verdict.to_json`)."""
    elapsed: float
    """The trial's clock after it."""
    at: float


class Call(msgspec.Struct, frozen=True):
    """One paid request and its reply."""

    trial: str
    key: str
    """Its place in the trial."""
    request_sha256: str
    request: dict[str, Any]
    reply: dict[str, Any]
    model: str
    prompt_tokens: int
    completion_tokens: int
    usd: float
    seconds: float
    at: float


class Outcome(msgspec.Struct, frozen=True):
    """What statistics and reports need of one trial that counts (``done`` or ``skipped``)."""

    trial: str
    experiment: str
    agent: str
    arm: str
    dsl: str
    problem: str
    family: str
    repetition: int
    state: State
    score: float
    low: float
    high: float
    confirmed: bool
    simulated: bool
    device: str
    has_skill: bool
    """Whether it ended with a skill that the agent wrote."""
    given_skill: bool
    submissions: int
    curve: tuple[float, ...]
    """The best speed-up after submission 1, 2, ...; before the final judging."""
    elapsed: float = 0.0
    tokens: int = 0
    usd: float = 0.0
    roofline: float = 0.0
    """Of the best submission's verdict: its bound over its time."""
