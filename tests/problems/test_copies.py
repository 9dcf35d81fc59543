"""No two problems share more than trivial code by copy: the same operation lives in the family's ``common.py``."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from mkb_env.problems.contract import ROOT

LARGEST = 110
"""Nodes of a syntax tree that two files may have in common in one run of statements: about five lines."""


class _Anonymous(ast.NodeTransformer):
    """Names by their order of appearance, so that renaming hides no copy; docstrings and annotations dropped."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.setdefault(node.id, f"n{len(self.names)}"), ast.Load())

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.names.setdefault(node.arg, f"n{len(self.names)}"))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node = ast.FunctionDef("f", node.args, node.body, [], None)
        return self.generic_visit(node)


def size(node: ast.AST) -> int:
    """Nodes of a tree that are more than punctuation."""
    return sum(not isinstance(part, ast.expr_context) for part in ast.walk(node))


def runs(path: Path) -> dict[str, tuple[int, int]]:
    """Every run of statements of one block that is larger than ``LARGEST``, anonymous -> (line, size)."""
    found: dict[str, tuple[int, int]] = {}
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        for first in range(len(body)):
            for last in range(first + 1, len(body) + 1):
                total = sum(map(size, body[first:last]))
                if total > LARGEST:
                    names = _Anonymous()
                    text = "\n".join(ast.dump(names.visit(ast.parse(ast.unparse(s)))) for s in body[first:last])
                    found[text] = (body[first].lineno, total)
                    break
    return found


def copies(paths: list[Path]) -> list[str]:
    """Where code of one file stands in another."""
    places = defaultdict(list)
    for path in paths:
        for text, (line, total) in runs(path).items():
            places[text].append(f"{path.parent.name}/{path.name}:{line} ({total} nodes)")
    return sorted(" = ".join(found) for found in places.values() if len(found) > 1)


def test_copies_are_found(tmp_path: Path) -> None:
    body = "\n".join(f"    y{i} = torch.einsum('ij,jk->ik', x, {i} * x).softmax(-1) @ x[:, {i}:]" for i in range(6))
    for name, argument in (("a", "x"), ("b", "z"), ("c", "w")):
        text = f"def reference({argument}):\n" + body.replace("x)", f"{argument})").replace(" x", f" {argument}")
        if name == "c":
            text = text.replace("softmax", "sigmoid")
        (tmp_path / f"{name}.py").write_text(text)
    found = copies(sorted(tmp_path.glob("*.py")))
    assert found and all("a.py" in line and "b.py" in line and "c.py" not in line for line in found)


def test_no_problem_is_copied() -> None:
    assert copies(sorted(ROOT.glob("*/*/problem.py"))) == []
