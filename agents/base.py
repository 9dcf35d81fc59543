"""What an agent is, and what the protocol gives it besides the environment.

Adding an agent is adding a file here (or anywhere that Python imports from) with a function ``make(name, options)``;
an experiment names the file, or ``package.module:function``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import msgspec

from mkb_env.env import Action, Observation


class BudgetExceeded(Exception):
    """A paid call that the trial's tokens, money or time no longer allow. Nothing was asked of anyone."""


class Limits(msgspec.Struct, frozen=True):
    """What one trial may spend on paid calls; None: without bound."""

    tokens: int | None = None
    """Prompt and completion together."""
    usd: float | None = None


class Spent(msgspec.Struct, frozen=True):
    """What paid calls took."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Reply(msgspec.Struct, frozen=True):
    """The answer to a paid call, as it was received."""

    body: dict[str, Any]
    """JSON."""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    seconds: float = 0.0


class CallLog(Protocol):
    """Every paid call goes through here, so that none is paid for twice."""

    @property
    def spent(self) -> Spent:
        """What this trial's calls took so far, those of an interrupted run of it included."""

    def call(self, key: str, request: dict[str, Any], ask: Callable[[], Reply]) -> Reply:
        """The reply to ``request``: the recorded one if this trial has asked the same under the same key, else that
        of ``ask()``, which is on disk before it is returned. Called from several threads.

        Args:
            key: the call's place in the trial, for example ``turn 3, candidate 1``; unique within the trial.
            request: JSON without keys and secrets; it is stored.
            ask: makes the call and waits for its reply.

        Raises:
            BudgetExceeded: if the trial's limits are used up; ``ask`` was not called.
        """


@dataclass(frozen=True)
class Assignment:
    """What one trial asks of an agent."""

    seed: int
    """Of the agent's own randomness: with the same seed and the same answers it acts the same."""
    arm: str
    wants_skill: bool
    """Whether another trial is to use the note that this one ends with."""
    limits: Limits
    calls: CallLog


class Agent(Protocol):
    """Plays episodes. One object plays many, in several threads at once."""

    name: str

    def fingerprint(self) -> dict[str, str]:
        """Whatever changes when the agent would act differently: model, parameters, a digest of its prompts."""

    def play(
        self, env: gym.Env[Observation, Action], observation: Observation, info: dict[str, Any], assignment: Assignment
    ) -> None:
        """Play one episode from the observation that ``reset`` gave. Whoever stops before its end is taken to finish.

        An agent that is asked again with the same seed, and gets the same answers, must take the same actions: so an
        interrupted trial goes on where it was.

        Raises:
            BudgetExceeded: from :meth:`CallLog.call`, if the agent does not catch it: the trial ends as if finished.
        """


def load_agent(name: str, use: str | None = None, options: Mapping[str, Any] | None = None) -> Agent:
    """The agent ``name``, made by ``use`` (by default a file of that name here) from ``options``.

    Raises:
        ValueError: in one sentence, if there is no such agent or it refuses its options.
    """
    use = use or name
    module_name, _, function = use.partition(":")
    try:
        module = importlib.import_module(module_name if function else f"mkb_env.agents.{module_name}")
        make = getattr(module, function or "make")
    except ModuleNotFoundError as error:
        if error.name and not f"mkb_env.agents.{module_name}".startswith(error.name) and error.name != module_name:
            raise ValueError(f"agent {name!r} needs the package {error.name!r}, which is not installed") from None
        raise ValueError(f"there is no agent {use!r}: name a file of agents/ or package.module:function") from None
    except (AttributeError, ImportError) as error:
        raise ValueError(f"agent {name!r}: {use!r} gives no agent ({error})") from None
    agent: Agent = make(name, dict(options or {}))
    return agent
