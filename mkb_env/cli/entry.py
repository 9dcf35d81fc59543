"""How the command line ends where something is wrong: one sentence and an exit code, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""Click's ClickException, wherever this release of Typer keeps Click."""
INTERRUPTED = 130
"""What shells make of a process that SIGINT ended."""


class OneSentence(TyperGroup):
    """Misuse, an unusable file and a server that does not start end with one sentence on stderr, exit code 2.

    With ``--json``, the sentence is ``{"error": "..."}`` on stdout. Ctrl-C ends with ``interrupted``, exit code 130.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        as_json = standalone_mode and "--json" in arguments
        try:
            ended = super().main(
                arguments, prog_name, complete_var, standalone_mode and not as_json, windows_expand_args, **extra
            )
        except USAGE_ERROR as error:
            if not as_json:
                raise
            _end(getattr(error, "format_message", error.__str__)(), as_json)
        except OSError as error:
            _end(f"{error.strerror}: {error.filename}" if error.filename else str(error), as_json)
        except RuntimeError as error:
            if not _is_server_error(error):
                raise
            _end(str(error), as_json)
        if as_json:
            sys.exit(ended if isinstance(ended, int) else 0)
        return ended

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def _is_server_error(error: RuntimeError) -> bool:
    from mkb_env.servers.client import ServerError

    return isinstance(error, ServerError)


def _end(sentence: str, as_json: bool) -> None:
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.encode({"error": sentence}).decode() + "\n")
    else:
        print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)
