"""Wrappers that fit the environment to its players."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any, SupportsFloat

import gymnasium as gym

from mkb_env.env import MAX_TEXT_BYTES, Action, Finish, Kind, Observation, Submit, WriteSkill
from mkb_env.legality.rules import MAX_SOURCE_BYTES
from mkb_env.spaces import Utf8, printable

MAX_REPLY_BYTES = 4 * MAX_SOURCE_BYTES

FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*$", re.MULTILINE)
DEFINES_SOLVE = re.compile(r"^(def\s+solve\s*\(|solve\s*=)", re.MULTILINE)
SKILL_LINE = re.compile(r"^\s*SKILL:[ \t]*", re.MULTILINE)
FINISH_LINE = re.compile(r"^\s*FINISH\.?\s*$", re.MULTILINE)
FINISH_WORD = re.compile(r"\bFINISH\b|^\W*(?i:finish)\W*$", re.MULTILINE)
HOW_TO_REPLY = (
    "Reply with one fenced code block that holds the whole source and defines solve; "
    "or with a ```skill block (or SKILL: and the text) to store a skill; or with the line FINISH."
)


def blocks(reply: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a reply, in order; one that is never closed is left out."""
    found: list[tuple[str, str]] = []
    position = 0
    while opening := FENCE.search(reply, position):
        mark = opening["fence"]
        closing = re.compile(rf"^ {{0,3}}{re.escape(mark[0])}{{{len(mark)},}}[ \t]*\r?$", re.MULTILINE)
        end = closing.search(reply, opening.end())
        if end is None:
            break
        text = reply[opening.end() : end.start()]
        found.append((opening["language"].lower(), text.removeprefix("\r").removeprefix("\n")))
        position = end.end()
    return found


def read_reply(reply: str) -> Action | None:
    """The action that a plain-text reply asks for, or None if it asks for none.

    In this order: the last fenced block that defines ``solve`` is submitted; a reply that is itself a Python source
    defining ``solve`` is submitted; the last block marked ``skill``, or what follows ``SKILL:`` at the start of a line,
    is written as the skill; a line ``FINISH`` ends the episode. One reply is one action, so what comes later in this
    list is ignored where something earlier is found.
    """
    fenced = blocks(reply)
    sources = [text for language, text in fenced if language != "skill" and DEFINES_SOLVE.search(text)]
    if sources:
        return Submit(sources[-1])
    if DEFINES_SOLVE.search(reply) and _parses(reply):
        return Submit(reply)
    skills = [text for language, text in fenced if language == "skill"]
    if skills:
        return WriteSkill(skills[-1].strip())
    if marks := list(SKILL_LINE.finditer(reply)):
        return WriteSkill(FINISH_LINE.sub("", reply[marks[-1].end() :]).strip())
    return Finish() if FINISH_LINE.search(reply) else None


def what_is_missing(reply: str) -> str:
    """Why :func:`read_reply` finds no action in ``reply``, in one sentence."""
    fenced = blocks(reply)
    if FENCE.search(reply) and len(FENCE.findall(reply)) > 2 * len(fenced):
        return "The last code block is not closed."
    if fenced:
        return "The code block does not define solve at the start of a line."
    if FINISH_WORD.search(reply):
        return "FINISH must stand alone on its line, in capitals."
    return "It has no fenced code block."


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class TextAction(gym.Wrapper[Observation, Any, Observation, Action]):
    """Plays with the plain text that a language model replies, read by :func:`read_reply`.

    A reply that asks for nothing is handed in as a source, so that it costs a submission and no player can stall an
    episode; the feedback then begins with what was missing. ``info["action"]`` is ``submit``, ``write_skill``,
    ``finish`` or ``none``.
    """

    def __init__(self, env: gym.Env[Observation, Any]) -> None:
        super().__init__(env)
        self.action_space: gym.Space[str] = Utf8(MAX_REPLY_BYTES)

    def step(self, action: str) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """One reply. Raises ValueError if it is not a string."""
        if not isinstance(action, str):
            raise ValueError(f"TextAction takes the reply as a string, got {type(action).__name__}")
        found = read_reply(action)
        observation, reward, terminated, truncated, info = self.env.step(found or Submit(action))
        if found is None:
            feedback = (
                f"NO ACTION WAS FOUND IN THE REPLY. {what_is_missing(action)} {HOW_TO_REPLY} "
                f"The reply was taken as a source instead:\n{observation['feedback']}"
            )
            observation = {**observation, "feedback": printable(feedback, MAX_TEXT_BYTES)}
        name = Kind(found["kind"]).name.lower() if found else "none"
        return observation, reward, terminated, truncated, {**info, "action": name}
