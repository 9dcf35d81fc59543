"""The command line, ``mkb``. Commands import what they need when they run: no torch and no DSL in this process.

Exit codes: 0 passed (or done), 1 not passed (or a check failed), 2 misuse. With ``--json`` a command prints exactly one
JSON object on stdout; everything else goes to stderr.
"""

from __future__ import annotations

from mkb_env.cli.app import main

__all__ = ["main"]
