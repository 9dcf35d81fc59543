"""A skill is plain prose."""

from __future__ import annotations

import pytest

from mkb_env.agents.scripted import SKILL
from mkb_env.legality import MAX_SKILL_CHARACTERS, refuse_skill


@pytest.mark.parametrize(
    "text",
    [
        SKILL,
        "Use `cp.async` with 16-byte vectors; keep two stages in flight.",
        "First, stage tiles.\n\n- then multiply\n- then store\n\n1. One warp per row.",
        "Tiling\nhelps",
        "Return early if a row is empty: it has no work",
        "Pass pointers, not copies.",
        "Größe zählt → immer.",
        "Import nothing that you do not need.",
    ],
)
def test_prose_is_taken(text: str) -> None:
    assert refuse_skill(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("a" * (MAX_SKILL_CHARACTERS + 1), "at most"),
        ("# Kernels\nUse tiles.", "headings"),
        ("Kernels\n=======\nUse tiles.", "headings"),
        ("Kernels\n---\nUse tiles.", "headings"),
        ("**Kernels**\nUse tiles.", "headings"),
        ("Write:\n```\nx\n```", "code"),
        ("Write:\nimport cutlass", "code"),
        ("Write:\n    acc = acc + x[i]", "code"),
        ("for i in range(4):\n    pass", "code"),
        ("@cute.kernel\ndef f(): ...", "code"),
        ("Write acc += x;", "code"),
        ("if (row < n) {", "code"),
        ("cute.arch.sync_threads()", "code"),
        ("- acc = acc + x[i]", "code"),
        ("1. import cutlass", "code"),
        ("> `cute.arch.sync_threads()`", "code"),
    ],
)
def test_refused_with_the_reason(text: str, reason: str) -> None:
    refusal = refuse_skill(text)
    assert refusal is not None
    assert reason in refusal
