"""Errors of a submission, told in its own terms: class, message, and the line in its source, without other frames."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from mkb_env.dsl import Dsl
from mkb_env.recorder.protocol import Failure, FailureKind, SourceLocation, clip
from mkb_env.recorder.tape import HostRefusal

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def failure_from(cause: BaseException, raised: BaseException, path: Path, source: str, dsl: Dsl) -> Failure:
    """Describe what went wrong.

    Args:
        cause: the refusal behind an error that a DSL reported as an error number, else ``raised`` itself.
        raised: the exception that reached us.
        path: the submission's file, as tracebacks name it.
        source: the submission's text.
        dsl: the DSL it is written in.
    """
    refusal = find_refusal(cause) or find_refusal(raised)
    if refusal is not None:
        where = location_of(raised, path, source) or location_of(refusal, path, source)
        return Failure("host_error", str(refusal), "HostRefusal", where, refusal.hint)
    message = clean_message(raised, path)
    where = location_in_text(message, path, source) or location_of(raised, path, source)
    hint = next((hint for pattern, hint in dsl.HINTS if re.search(pattern, message)), "")
    return Failure(kind_of(raised, path, dsl), clip(message) or "no message", type(raised).__name__, where, hint)


def find_refusal(error: BaseException) -> HostRefusal | None:
    """The refusal in an exception's chain, if any."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, HostRefusal):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


def kind_of(error: BaseException, path: Path, dsl: Dsl) -> FailureKind:
    """``compile_error`` where the DSL raised, ``rejected`` where the source does not parse, else ``host_error``."""
    frames = traceback.extract_tb(error.__traceback__)
    if re.search(dsl.CALL_ERRORS, ANSI.sub("", str(error)).strip()):
        return "host_error"
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return "rejected"
    if isinstance(error, MemoryError | SystemExit | KeyboardInterrupt):
        return "host_error"
    if frames and dsl.is_compiler_frame(frames[-1].filename):
        return "compile_error"
    if type(error).__module__.split(".")[0] in (*dsl.IMPORTS, "tvm_ffi"):
        return "compile_error"
    inside = [dsl.is_compiler_frame(frame.filename) for frame in frames]
    # user code that runs under the compiler (tracing a kernel) is being compiled
    return "compile_error" if any(inside) else "host_error"


def clean_message(error: BaseException, path: Path) -> str:
    """The error's own text, in plain characters, with our file and frames taken out."""
    if isinstance(error, SyntaxError):
        return error.msg
    if isinstance(error, SystemExit):
        return f"the submission called exit({error.code!r})"
    if isinstance(error, MemoryError):
        return str(error) or "the submission ran out of its memory limit"
    text = ANSI.sub("", str(error)).replace("\r\n", "\n")
    text = text.replace(str(path), path.name).replace(str(path.parent), "")
    kept = [line for line in text.splitlines() if not re.search(r'^\s*File ".*(site-packages|/lib/python)', line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def location_of(error: BaseException, path: Path, source: str) -> SourceLocation | None:
    """The innermost frame of the error that lies in the submission."""
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno:
        return at(source, error.lineno, error.offset or 0)
    current: BaseException | None = error
    while current is not None:
        for frame in reversed(traceback.extract_tb(current.__traceback__)):
            if frame.filename == str(path) and frame.lineno:
                return at(source, frame.lineno, (frame.colno or 0) + 1)
        current = current.__cause__ or current.__context__
    return None


def location_in_text(message: str, path: Path, source: str) -> SourceLocation | None:
    """A place in the submission that a compiler names in its message."""
    for pattern in (rf"{re.escape(path.name)}:(\d+)(?::(\d+))?", rf'{re.escape(path.name)}",? line (\d+)()'):
        found = re.search(pattern, message)
        if found:
            return at(source, int(found[1]), int(found[2] or 0))
    return None


def at(source: str, line: int, column: int) -> SourceLocation:
    """A location with its source line."""
    lines = source.splitlines()
    return SourceLocation(line, column, lines[line - 1] if 0 < line <= len(lines) else "")
