"""Parsing Python sources from several threads."""

from __future__ import annotations

import ast
import threading

_PARSING = threading.Lock()


def parse(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """``ast.parse``, one thread at a time.

    CPython up to 3.12 keeps the recursion depth of building trees per interpreter, not per thread, and fails with
    "AST constructor recursion depth mismatch" where two threads take turns at it.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as ``ast.parse`` does.
    """
    with _PARSING:
        return ast.parse(source, filename)
