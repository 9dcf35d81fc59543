"""The command line, ``mkb``. Commands import what they need when they run: no torch and no DSL in this process.

Exit codes: 0 passed (or done); 1 not passed (or a check failed), whatever the stage: ``unsupported`` and
``infra_error`` too, which the JSON's ``stage`` tells; 2 misuse, an unusable file or server; 130 Ctrl-C. With ``--json``
a command prints exactly one JSON object on stdout (``{"error": "..."}`` with exit code 2); the rest goes to stderr.
"""

from __future__ import annotations

from mkb_env.cli.app import main

__all__ = ["main"]
