"""Wrappers that fit the environment to its players."""

from __future__ import annotations

import re
import warnings
from typing import Any, SupportsFloat

import gymnasium as gym

from mkb_env.env import MAX_TEXT_BYTES, Action, Finish, Kind, Observation, Submit, WriteSkill
from mkb_env.legality.rules import MAX_SOURCE_BYTES
from mkb_env.spaces import Utf8, printable
from mkb_env.syntax import parse

MAX_REPLY_BYTES = 4 * MAX_SOURCE_BYTES

# nothing here can match across lines or in more than one way: a reply is of any length and any shape
DEFINES_SOLVE = re.compile(r"^(def[ \t]+solve[ \t]*\(|solve[ \t]*=)", re.MULTILINE)
SKILL_LINE = re.compile(r"^[ \t]*SKILL:[ \t]*", re.MULTILINE)
FINISH_LINE = re.compile(r"^[ \t]*FINISH\.?[ \t\r]*$", re.MULTILINE)
FINISH_WORD = re.compile(r"\bFINISH\b|^[^\w\n]*(?i:finish)[^\w\n]*$", re.MULTILINE)
HOW_TO_REPLY = (
    "Reply with one fenced code block that holds the whole source and defines solve; "
    "or with a ```skill block (or SKILL: and the text) to store a skill; or with the line FINISH."
)


def blocks(reply: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a reply, in order; one that is never closed is left out."""
    return _fenced(reply)[0]


def _fenced(reply: str) -> tuple[list[tuple[str, str]], bool]:
    """The closed blocks of a reply, and whether one more is open at its end."""
    found: list[tuple[str, str]] = []
    mark, language = "", ""
    inside: list[str] = []
    for line in reply.split("\n"):
        fence, info = _fence(line)
        if not mark:
            if fence and not (fence[0] == "`" and "`" in info):
                mark, language, inside = fence, (info.split() or [""])[0].lower(), []
        elif fence.startswith(mark) and not info:
            found.append((language, "".join(f"{text}\n" for text in inside)))
            mark = ""
        else:
            inside.append(line)
    return found, bool(mark)


def _fence(line: str) -> tuple[str, str]:
    """The fence at the beginning of a line (three or more backticks or tildes, or nothing) and what follows it."""
    text = line.lstrip(" ")
    rest = text.lstrip(text[0]) if text[:1] in ("`", "~") else text
    length = len(text) - len(rest)
    if length < 3 or len(line) - len(text) > 3:
        return "", ""
    return text[:length], rest.strip()


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
    fenced, unclosed = _fenced(reply)
    if unclosed:
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
            parse(text)
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
