"""The problems: one folder each, found by name; importing this package loads no torch."""

from mkb_env.problems.contract import DSLS, FAMILIES, Problem, ProblemRef, catalog, find, load, load_checks

__all__ = ["DSLS", "FAMILIES", "Problem", "ProblemRef", "catalog", "find", "load", "load_checks"]
