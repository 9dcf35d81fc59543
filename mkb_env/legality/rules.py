"""The table of rules, and :func:`check`, which applies it."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mkb_env.dsl import NAMES, get
from mkb_env.legality import forbidden
from mkb_env.legality.source import Named, Source, line_of
from mkb_env.recorder.protocol import Failure, SourceLocation
from mkb_env.syntax import parse

MAX_SOURCE_BYTES = 300_000
CANARY = "mkb-baseline-" + "canary"  # joined here, so that this file does not trip over it
MAX_LINE = 200
"""Characters of an evidence line that are kept."""
PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Finding:
    """A breach: where (line and column from 1; 0: the source as a whole), and what was found there."""

    evidence: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True)
class Rule:
    """One rule. ``find`` yields its breaches in a source that parses (rules over the text find them before)."""

    id: str
    sentence: str
    """What is asked for, addressed to the author of the source."""
    find: Callable[[Source], Iterable[Finding]]
    hint: str = ""


def check(source: str, dsl: str, inputs: tuple[str, ...] | None = None) -> Failure | None:
    """The first rule that ``source`` breaks, or None.

    Args:
        source: the submission; any ``str``, lone surrogates included.
        dsl: the DSL it is to be written in.
        inputs: the names of ``solve``'s arguments, if the number of arguments is to be checked.

    Raises:
        ValueError: if there is no such DSL.
    """
    get(dsl)
    refused = _check_text(source)
    if refused:
        return refused
    tree = _parse(source)
    if isinstance(tree, Failure):
        return tree
    try:
        parsed = Source(source, dsl, inputs, tree)
        for rule in RULES:
            for finding in rule.find(parsed):
                return _failure(source, rule, finding)
    except (RecursionError, MemoryError):
        return _failure(source, PARSES, Finding("an expression nested too deeply"))
    return None


def refuse_baseline(source: str) -> Failure | None:
    """A refusal if ``source`` carries the mark of this project's own kernels, which agents are not to hand in.

    Not part of :func:`check`, since those kernels themselves are judged too.
    """
    at = source.find(CANARY)
    if at < 0:
        return None
    return _failure(source, OWN, Finding("the mark of a kernel of this project", source.count("\n", 0, at) + 1))


def _failure(source: str, rule: Rule, finding: Finding) -> Failure:
    location = None
    where = ""
    if finding.line:
        text = line_of(source, finding.line)[:MAX_LINE]
        location = SourceLocation(line=finding.line, column=finding.column, text=text)
        where = f"line {finding.line}, "
    return Failure(
        kind="rejected",
        message=f"[{rule.id}] {rule.sentence} Found: {where}{finding.evidence}.",
        error_class=rule.id,
        location=location,
        hint=rule.hint,
    )


def _check_text(source: str) -> Failure | None:
    size = len(source.encode(errors="surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        evidence = f"{size:,} bytes"
        return _failure(source, SIZE, Finding(evidence))
    for number, character in enumerate(source):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            line = source.count("\n", 0, number) + 1
            evidence = f"the character U+{ord(character):04X}"
            clean = source.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
            return _failure(clean, TEXT, Finding(evidence, line, number - source.rfind("\n", 0, number)))
    return None


def _parse(source: str) -> ast.Module | Failure:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape sequence is the author's business
            return parse(source.removeprefix("\ufeff"), filename="submission.py")  # as an import would read it
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        text = line_of(source, line)
        what = f"{type(error).__name__} ({PYTHON})"
        caret = f"\n    {text[:MAX_LINE]}\n    {' ' * (column - 1)}^" if 0 < column <= MAX_LINE else ""
        return Failure(
            kind="rejected",
            message=f"[{PARSES.id}] {PARSES.sentence} {what}: {error.msg}, line {line}{caret}",
            error_class=type(error).__name__,
            location=SourceLocation(line=line, column=column, text=text[:MAX_LINE]),
        )
    except (RecursionError, MemoryError, ValueError) as error:
        evidence = f"{type(error).__name__}: {error or 'too deeply nested'}"
        return _failure(source, PARSES, Finding(evidence))


def _at(named: Named, evidence: str) -> Finding:
    node = named.node
    return Finding(evidence, getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1)


def _names(table: tuple[str, ...]) -> Callable[[Source], Iterator[Finding]]:
    """Imports and uses of a dotted name of ``table``, or of anything inside it."""
    wanted = frozenset(table)
    deepest = max(name.count(".") + 1 for name in table)

    def match(name: str) -> str | None:
        parts = name.split(".")
        return next((p for n in range(1, min(len(parts), deepest) + 1) if (p := ".".join(parts[:n])) in wanted), None)

    def find(source: Source) -> Iterator[Finding]:
        for named in source.imports + source.uses:
            if name := match(named.name):
                yield _at(named, f"`{name}`")

    return find


def _no_nodes(source: Source) -> Iterator[Finding]:
    """For rules over the text, checked before there is a tree."""
    return iter(())


def _solve_defined(source: Source) -> Iterator[Finding]:
    for statement in source.top_level():
        if isinstance(statement, ast.AsyncFunctionDef) and statement.name == "solve":
            yield Finding("`async def solve`", statement.lineno, statement.col_offset + 1)
            return
        if isinstance(statement, ast.FunctionDef) and statement.name == "solve":
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "solve" for target in targets):
            return
        if isinstance(statement, ast.ImportFrom) and any((a.asname or a.name) == "solve" for a in statement.names):
            return
    functions = [s.name for s in source.tree.body if isinstance(s, ast.FunctionDef)]
    yield Finding(f"top-level functions {', '.join(functions[:8])}" if functions else "no top-level function at all")


def _solve_arity(source: Source) -> Iterator[Finding]:
    solves = [s for s in source.top_level() if isinstance(s, ast.FunctionDef) and s.name == "solve"]
    if source.inputs is None or not solves or solves[-1].decorator_list:
        return
    solve, count = solves[-1], len(source.inputs)
    arguments = solve.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    forced = [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    if forced or required > count or (positional < count and arguments.vararg is None):
        signature = ast.unparse(arguments)[:MAX_LINE]
        yield Finding(
            f"`solve({signature})`, called as `solve({', '.join(source.inputs)})` with {count} positional arguments",
            solve.lineno,
            solve.col_offset + 1,
        )


def _root(name: str) -> str:
    return name.split(".")[0]


def _imports_dsl(source: Source) -> Iterator[Finding]:
    wanted = get(source.dsl).IMPORTS
    if not any(_root(named.name) in wanted for named in source.imports):
        yield Finding(f"no import of {' or '.join(f'`{name}`' for name in wanted)} (the DSL asked for is {source.dsl})")


def _imports_other_dsl(source: Source) -> Iterator[Finding]:
    others = {module: name for name in NAMES if name != source.dsl for module in get(name).IMPORTS}
    for named in source.imports:
        if _root(named.name) in others:
            yield _at(named, f"`{_root(named.name)}`, which belongs to {others[_root(named.name)]}")


def _dynamic(source: Source) -> Iterator[Finding]:
    yield from _names(forbidden.DYNAMIC_CODE)(source)
    yield from (_at(named, f"`{named.name}`") for named in source.builtin_uses(forbidden.DYNAMIC_BUILTINS))
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in forbidden.HIDDEN_ATTRIBUTES:
            yield Finding(f"`.{node.attr}`", node.lineno, node.col_offset + 1)


def _files(source: Source) -> Iterator[Finding]:
    yield from _names(forbidden.FILES_AND_NETWORK)(source)
    yield from (_at(named, f"`{named.name}`") for named in source.builtin_uses(forbidden.FILE_BUILTINS))


SIZE = Rule("size", f"A source has at most {MAX_SOURCE_BYTES:,} bytes of UTF-8.", _no_nodes)
TEXT = Rule("text", "A source is text: no NUL, no half of a surrogate pair.", _no_nodes)
PARSES = Rule("syntax", "A source must parse as Python.", _no_nodes)
OWN = Rule("own", "A submission must be the agent's own, not a kernel of this project.", _no_nodes)
RULES: tuple[Rule, ...] = (
    SIZE,
    TEXT,
    PARSES,
    Rule("solve", "Define the function `solve` at the top level of the source.", _solve_defined),
    Rule("arguments", "`solve` must take the problem's inputs as positional arguments.", _solve_arity),
    Rule("dsl", "Write the kernels in the DSL asked for.", _imports_dsl),
    Rule("other-dsl", "Do not use the other DSL.", _imports_other_dsl),
    Rule("compiler", "No other compiler or array library may be used.", _names(forbidden.OTHER_COMPILERS)),
    Rule(
        "raw-source",
        "No CUDA, PTX, C++ or binary code may come past the DSL.",
        _names(forbidden.RAW_SOURCES),
        "use the DSL's own inline-assembly facility",
    ),
    Rule(
        "kernel-library",
        "No library of ready kernels may be used.",
        _names(forbidden.KERNEL_LIBRARIES),
        "compute it in a kernel of your own",
    ),
    Rule("project", "This project's own code is not the submission's to use.", _names(("mkb_env",))),
    Rule("process", "No processes, threads or signals.", _names(forbidden.PROCESSES)),
    Rule("files-network", "No files and no network.", _files),
    Rule("dynamic-code", "No code from strings, imports by name, or interpreter internals.", _dynamic),
)
"""In the order in which they are applied."""
