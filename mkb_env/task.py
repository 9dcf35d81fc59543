"""What an agent is told, read from files without importing a problem, torch or a DSL."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mkb_env.problems import ProblemRef, find
from mkb_env.syntax import parse

TIMED_WORKLOADS = {"full": "on a GPU", "small": "in the simulator"}
"""Workload -> where it is the default. Held-out shapes are judged too, and never shown."""


class _Resolver(ast.NodeTransformer):
    """Puts the file's constants in place of their names, and joins what ``|`` and arithmetic make of literals."""

    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self.constants = dict(constants)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        bound = {name.id for part in node.generators for name in ast.walk(part.target) if isinstance(name, ast.Name)}
        inner = _Resolver({name: value for name, value in self.constants.items() if name not in bound})
        return ast.NodeTransformer.generic_visit(inner, node)

    visit_GeneratorExp = visit_ListComp  # type: ignore[assignment]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.constants.get(node.id)
        return node if value is None else self.visit(copy.deepcopy(value))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        node = ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))
        if isinstance(node.op, ast.BitOr) and isinstance(node.left, ast.Dict) and isinstance(node.right, ast.Dict):
            pairs = [*zip(node.left.keys, node.left.values, strict=True)]
            pairs += zip(node.right.keys, node.right.values, strict=True)
            joined = {ast.unparse(key): (key, value) for key, value in pairs if key}
            return ast.Dict(*map(list, zip(*joined.values(), strict=True)))
        try:
            value = _ARITHMETIC[type(node.op)](ast.literal_eval(node.left), ast.literal_eval(node.right))
        except (KeyError, ValueError, TypeError):
            return node
        return ast.Constant(value)


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Briefing:
    """A problem's file as a syntax tree."""

    ref: ProblemRef
    tree: ast.Module

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """Module-level assignments to one name."""
        return {
            target.id: statement.value
            for statement in self.tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }

    def literal(self, name: str) -> Any:
        """The value of a constant.

        Raises:
            ValueError: if the file does not assign a literal to ``name``.
        """
        try:
            return ast.literal_eval(self.constants[name])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{self.ref.folder / 'problem.py'} must assign a literal to {name}: {error!r}") from None

    @property
    def title(self) -> str:
        return str(self.literal("TITLE"))

    @property
    def number(self) -> int:
        return int(self.literal("NUMBER"))

    @property
    def model(self) -> str:
        return str(self.literal("MODEL"))

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.literal("INPUTS"))

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.literal("OUTPUTS"))

    def shape_source(self, workload: str) -> str:
        """The shape of a workload, as Python source that needs nothing else of the file.

        Raises:
            ValueError: if the file has no such workload.
        """
        workloads = self.constants.get("WORKLOADS")
        for key, value in zip(getattr(workloads, "keys", ()), getattr(workloads, "values", ()), strict=True):
            if isinstance(key, ast.Constant) and key.value == workload:
                return ast.unparse(_Resolver(self.constants).visit(copy.deepcopy(value)))
        raise ValueError(f"{self.ref.folder / 'problem.py'} has no workload {workload!r}")

    @property
    def task(self) -> str:
        """The problem's docstring, the call, and the shapes that are timed."""
        shapes = "\n".join(
            f"  {name} (timed {where}): {self.shape_source(name)}" for name, where in TIMED_WORKLOADS.items()
        )
        return (
            f"{(ast.get_docstring(self.tree) or '').strip()}\n\n"
            f"The call: solve({', '.join(self.inputs)}) -> {', '.join(self.outputs)}\n\n"
            "Shapes that are judged, besides others of the same kind that are not shown (other keys than sizes say how "
            f"the inputs are drawn):\n{shapes}\n"
        )


def brief(slug: str) -> Briefing:
    """The briefing on a problem.

    Raises:
        ValueError: if there is no such problem.
    """
    ref = find(slug)
    return Briefing(ref, parse((ref.folder / "problem.py").read_text(encoding="utf-8")))
