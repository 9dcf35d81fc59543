"""What a skill may be: plain prose about writing kernels, short, without headings and code."""

from __future__ import annotations

import ast
import re
import warnings

from mkb_env.syntax import parse

MAX_SKILL_CHARACTERS = 4000

FENCE = re.compile(r"^\s*(```|~~~)")
HEADING = re.compile(r"^\s{0,3}(#{1,6}(\s|$)|(\*\*|__)[^*_]+(\*\*|__):?\s*$|<h[1-6]\b)", re.IGNORECASE)
UNDERLINE = re.compile(r"^\s{0,3}(=+|-{2,})\s*$")
C_CODE = re.compile(r"[;{}]\s*$")
MARKERS = re.compile(r"^\s*(?:(?:[-*+>]|\d{1,3}[.)])\s+)+|`")
"""List and quotation marks at the beginning of a line, and backticks: what follows is judged as if alone."""
DECORATOR = re.compile(r"^\s*@[A-Za-z_][\w.]*(\(.*\))?\s*$")


def refuse_skill(text: str) -> str | None:
    """Why ``text`` cannot be stored as a skill, in one sentence for its author, or None if it can."""
    if not text.strip():
        return "A skill must say something; this one is empty."
    if len(text) > MAX_SKILL_CHARACTERS:
        return f"A skill has at most {MAX_SKILL_CHARACTERS:,} characters; this one has {len(text):,}."
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        quoted = f"line {number}: {line.strip()[:80]!r}"
        if HEADING.match(line) or (number > 1 and UNDERLINE.match(line) and lines[number - 2].strip()):
            return f"A skill is plain prose without headings; {quoted} is one."
        bare = MARKERS.sub("", line)
        if FENCE.match(line) or any(test(bare) for test in (C_CODE.search, DECORATOR.match, _is_statement)):
            return f"A skill is plain prose without code; {quoted} is code. Describe it in words."
    return None


def _is_statement(line: str) -> bool:
    """Whether the line alone is a Python statement (a bare name or number is a word of prose)."""
    text = line.strip()
    for candidate in (text, f"{text}\n    pass"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                body = parse(candidate).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return any(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in body)
    return False
