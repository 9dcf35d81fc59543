"""Gymnasium environments in which an agent writes GPU kernels.

Importing this package registers the ``MKB/...`` ids and loads neither torch nor a DSL.
"""

from __future__ import annotations

import importlib
from typing import Any

from mkb_env.registration import register_all

EXPORTS = {
    "Finish": "mkb_env.env",
    "Judge": "mkb_env.judge.client",
    "KernelEnv": "mkb_env.env",
    "Stage": "mkb_env.judge.verdict",
    "Submit": "mkb_env.env",
    "TextAction": "mkb_env.wrappers",
    "Verdict": "mkb_env.judge.verdict",
    "WriteSkill": "mkb_env.env",
}
"""Public name -> module that defines it, imported on first use."""

__all__ = [*EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)


register_all()
