"""What a judging is doing, for a person at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_STAGE = "check 1/"
"""How the first stage of each shape's evaluation begins."""


@contextmanager
def told(quiet: bool) -> Iterator[Callable[[str], None] | None]:
    """An ``on_progress`` that keeps one line on stderr, gone at the end; None if no person is looking."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting (the first judging after a start takes some 10 s)") as status:
        yield numbered(lambda text: status.update(text))


def numbered(tell: Callable[[str], None]) -> Callable[[str], None]:
    """``tell`` with the number of the shape before each stage, from the second shape on."""
    shapes = 0

    def on_progress(stage: str) -> None:
        nonlocal shapes
        shapes += stage.startswith(FIRST_STAGE)
        tell(f"shape {shapes}: {stage}" if shapes > 1 else stage)

    return on_progress
