"""The problems: one folder each, found by name; importing this package loads no torch."""

from mkb_env.problems.contract import DSLS, FAMILIES, Cost, Problem, ProblemRef, Shape, catalog, find, load

__all__ = ["DSLS", "FAMILIES", "Cost", "Problem", "ProblemRef", "Shape", "catalog", "find", "load"]
