"""The two kernel DSLs, one module each; importing this package loads neither."""

from mkb_env.dsl.base import NAMES, Dsl, get

__all__ = ["NAMES", "Dsl", "get"]
