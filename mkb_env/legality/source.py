"""A parsed submission: its syntax tree, its imports, and the dotted names it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

MAX_PARTS = 12
"""Attributes after the first name that are followed: more than any name the rules know has."""


@dataclass(frozen=True)
class Named:
    """A dotted name, with imports resolved (``t.compile`` after ``import torch as t`` is ``torch.compile``)."""

    name: str
    node: ast.AST


@dataclass
class Source:
    """One submission. ``inputs`` are the names of ``solve``'s arguments, or None where the problem is not known."""

    text: str
    dsl: str
    inputs: tuple[str, ...] | None
    tree: ast.Module
    nodes: list[ast.AST] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Named]:
        """Every module or member imported, anywhere in the source; relative imports keep their dots."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Named(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                found += [Named(f"{module}.{alias.name}", node) for alias in node.names]
        return found

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name -> dotted name, from imports."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.split(".")[0]
                    names[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    @cached_property
    def bound(self) -> set[str]:
        """Names the source itself gives a meaning, anywhere: not the built-in of that name."""
        names = set(self.aliases)
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
        return names

    @cached_property
    def uses(self) -> list[Named]:
        """Every dotted name read in the source that starts at an import."""
        found = []
        for node in self.nodes:
            parts: list[str] = []
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute) and len(parts) <= MAX_PARTS:
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in self.aliases:
                found.append(Named(".".join([self.aliases[inner.id], *reversed(parts)]), node))
        return found

    def builtin_uses(self, names: frozenset[str]) -> Iterator[Named]:
        """Uses of the built-in functions of those names, unless the source binds the name itself."""
        for node in self.nodes:
            if isinstance(node, ast.Name) and node.id in names and node.id not in self.bound:
                yield Named(node.id, node)

    def top_level(self) -> Iterator[ast.stmt]:
        """Statements that run when the module is imported, inside ``if``, ``try`` and ``with`` as well."""
        pending: list[ast.stmt] = list(self.tree.body)
        while pending:
            statement = pending.pop(0)
            yield statement
            if isinstance(statement, ast.If | ast.Try | ast.With):
                pending += [inner for inner in ast.iter_child_nodes(statement) if isinstance(inner, ast.stmt)]
                for handler in getattr(statement, "handlers", []):
                    pending += handler.body


def line_of(text: str, number: int) -> str:
    """Line ``number`` (from 1) of ``text`` as Python counts lines, or an empty string."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[number - 1] if 1 <= number <= len(lines) else ""
