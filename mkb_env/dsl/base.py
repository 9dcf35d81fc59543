"""What the rest of the project knows about a kernel DSL. Adding one is one module and one line in :data:`NAMES`."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from mkb_env.recorder.tape import Tape

NAMES = ("cute", "tirx")


class Dsl(Protocol):
    """A DSL's module implements this by its functions and constants. Importing the module does not import the DSL."""

    NAME: str
    """Short name, as in environment ids."""
    TITLE: str
    PACKAGES: tuple[str, ...]
    """Distributions it needs, by their registry names."""
    IMPORTS: tuple[str, ...]
    """Top-level modules a source written in this DSL imports."""
    CONTRACT: str
    """What an agent is told about submissions in this DSL, with a minimal example."""
    HINTS: tuple[tuple[str, str], ...]
    """(regular expression over a compiler's message, one-line hint) for known traps."""

    CALL_ERRORS: str
    """Regular expression over messages of compiled functions that were called with wrong arguments."""

    def preload(self) -> None:
        """Import the DSL with its launches intercepted; once, in the recorder's warm parent."""

    def attach(self, tape: Tape, scratch: str) -> list[ctypes.CDLL]:
        """In the recorder's child: send compiled modules to ``tape``.

        ``scratch`` is a writable folder. Returns the libraries whose calls the tape must receive.
        """

    def is_compiler_frame(self, filename: str) -> bool:
        """Whether a traceback's frame belongs to the DSL's own code."""

    def versions(self) -> dict[str, str]:
        """Versions of what shapes the compiled code. Needs no import of the DSL."""


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Distribution -> version, of those that are installed (headers and NVRTC may come with a toolkit instead)."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def get(name: str) -> Dsl:
    """The DSL of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in NAMES:
        raise ValueError(f"dsl must be one of {', '.join(NAMES)}, got {name!r}")
    return cast(Dsl, importlib.import_module(f"mkb_env.dsl.{name}"))
