"""Reads PTX text into plain records. Grammar: PTX ISA 9.x, chapters 4 (syntax), 5 (state spaces) and 7 (functions).

Only the shape of the text is read here: which instructions exist is decided when one is executed. Debug directives
(``.loc``, ``.file``, ``.section``) are skipped. Function bodies are split into statements on first use, because a
module may hold far more code than a launch reaches.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

from mkb_env.devices.simulator.operands import Operand, parse_operands, split_operands

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "tf32": 4, "f16x2": 4, "bf16x2": 4, "e4m3x2": 2, "e5m2x2": 2,
    "u16x2": 4, "s16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
}  # fmt: skip
"""Bytes of a register or memory element of each PTX type."""


class PtxError(ValueError):
    """PTX text that does not parse; the message names the line."""


@dataclass(frozen=True)
class Statement:
    """One statement of a body: an instruction, a label, a declaration, or the opening or closing of a scope."""

    kind: str
    """``op``, ``label``, ``var``, ``targets``, ``open`` or ``close``."""
    line: int
    text: str = ""
    opcode: str = ""
    guard: str = ""
    negated: bool = False
    variable: Variable | None = None
    names: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of an instruction. Raises PtxError."""
        try:
            return parse_operands(self.text)
        except ValueError as error:
            raise PtxError(f"PTX line {self.line}: {error}") from None


@dataclass(frozen=True)
class Variable:
    """A declaration. ``count`` elements of ``type``; None is an array without a size (dynamic shared memory)."""

    space: str
    name: str
    type: str
    align: int
    count: int | None
    vector: int = 1
    parameterized: int = 0
    """N of ``%r<N>``: declares the registers 0 ... N-1 with that prefix."""
    initial: str = ""
    external: bool = False

    @property
    def nbytes(self) -> int:
        return TYPE_BYTES[self.type] * self.vector * (self.count or 0)


@dataclass
class Function:
    """An entry or a device function. ``body`` is None for a declaration."""

    name: str
    entry: bool
    params: tuple[Variable, ...]
    results: tuple[Variable, ...]
    body: str | None
    line: int
    directives: str = ""

    @cached_property
    def statements(self) -> list[Statement]:
        """The body in order. Raises PtxError."""
        return parse_body(self.body or "", self.line)


@dataclass
class Module:
    """A parsed PTX file."""

    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def entries(self) -> list[Function]:
        return [function for function in self.functions.values() if function.entry]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LINE_DIRECTIVE = re.compile(r"\.(?:version|target|address_size|loc|file|language|explicitcluster)\b[^\n]*")
_SECTION = re.compile(r"\.section\b[^{]*\{[^}]*\}")
_FUNCTION = re.compile(r"((?:\.(?:visible|weak|extern|common)\s+)*)\.(entry|func)\b")
_STATEMENT = re.compile(
    r"""\s*(?:
      (?P<brace>[{}])
    | (?P<label>[A-Za-z_$%][\w$%]*)\s*:(?!:)
    | \.(?:loc|file)\b[^\n]*
    | (?P<directive>\.[a-z]\w*)\b(?P<rest>[^;]*);
    | (?:@(?P<not>!?)\s*(?P<guard>[%\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);
    )""",
    re.X,
)
_VARIABLE = re.compile(
    r"""(?P<mods>(?:\.\w+\s*)*?)\.(?P<space>reg|local|shared|global|const|param)\b(?:::\w+)?
        (?P<attrs>(?:\s*\.(?:align\s+\d+|ptr|attribute\s*\([^)]*\)|v2|v4|v8|managed|unified|(?:global|shared|local|const)\b))*)
        \s*\.(?P<type>\w+)(?P<attrs2>(?:\s*\.(?:ptr|align\s+\d+|global|shared|local|const)\b(?:\s+\d+)?)*)
        \s*(?P<names>.*)""",
    re.X | re.S,
)
_DECLARATOR = re.compile(
    r"\s*(?P<name>[A-Za-z_$%][\w$]*)\s*(?:<(?P<many>\d+)>)?\s*(?P<dims>(?:\[[^\]]*\]\s*)*)(?:=(?P<init>.*))?$", re.S
)


def parse_module(text: str) -> Module:
    """Read a PTX file. Raises PtxError."""
    module = Module(lines=text.split("\n"))
    text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    text = _SECTION.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    starts = [match.end() for match in re.finditer("\n", text)]
    position = 0
    while True:
        position = _skip(text, position)
        if position >= len(text):
            return module
        line = bisect_right(starts, position) + 1
        if directive := _LINE_DIRECTIVE.match(text, position):
            position = directive.end()
        elif function := _FUNCTION.match(text, position):
            position = _parse_function(module, text, function, starts)
        else:
            end = text.find(";", position)
            if end < 0:
                raise PtxError(
                    f"PTX line {line}: expected a declaration, got {text[position : position + 40].strip()!r}"
                )
            for variable in parse_variables(text[position:end], line):
                module.variables[variable.name] = variable
            position = end + 1


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _parse_function(module: Module, text: str, start: re.Match[str], starts: list[int]) -> int:
    """Read one function from its header on; returns the position after it."""
    line = bisect_right(starts, start.start()) + 1
    stop = re.compile("[{;]").search(text, start.end())
    if not stop:
        raise PtxError(f"PTX line {line}: a function without a body or semicolon")
    header = text[start.end() : stop.start()]
    match = re.match(r"\s*(\([^)]*\))?\s*([A-Za-z_$%][\w$]*)\s*(\((?:[^()]|\([^)]*\))*\))?(.*)", header, re.S)
    if not match:
        raise PtxError(f"PTX line {line}: expected a function name, got {header.strip()[:60]!r}")
    results, name, params, directives = match.groups()
    body, end = None, stop.end()
    if stop[0] == "{":
        end = _closing(text, stop.start())
        body = text[stop.end() : end - 1]
    function = Function(
        name=name,
        entry=start[2] == "entry",
        params=_parse_params(params, line),
        results=_parse_params(results, line),
        body=body,
        line=bisect_right(starts, stop.start()) + 1,
        directives=directives.strip(),
    )
    if body is not None or name not in module.functions:
        module.functions[name] = function
    return end


def _closing(text: str, position: int) -> int:
    """Position after the brace that closes the one at ``position``."""
    depth = 0
    for match in re.compile(r'[{}]|"[^"\n]*"').finditer(text, position):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise PtxError("a brace is never closed")


def _parse_params(text: str | None, line: int) -> tuple[Variable, ...]:
    if not text or not text.strip("() \t\n"):
        return ()
    inner = text.strip()[1:-1]
    return tuple(variable for part in split_operands(inner) for variable in parse_variables(part, line))


def parse_variables(text: str, line: int) -> list[Variable]:
    """The variables of one declaration, without its semicolon. Raises PtxError."""
    match = _VARIABLE.match(text.strip())
    if not match or match["type"] not in TYPE_BYTES:
        raise PtxError(f"PTX line {line}: expected a declaration, got {text.strip()[:80]!r}")
    attributes = match["attrs"] + match["attrs2"]
    vector = re.search(r"\.v(\d)", attributes)
    align = re.search(r"\.align\s+(\d+)", match["attrs"])
    size = TYPE_BYTES[match["type"]] * (int(vector[1]) if vector else 1)
    names = match["names"]
    parts = [names] if "=" in names else split_operands(names)
    variables = []
    for part in parts:
        item = _DECLARATOR.match(part)
        if not item:
            raise PtxError(f"PTX line {line}: expected a variable name, got {part.strip()[:60]!r}")
        count: int | None = 1
        for dimension in re.findall(r"\[([^\]]*)\]", item["dims"] or ""):
            count = count * int(dimension, 0) if dimension.strip() and count is not None else None
        initial = (item["init"] or "").strip()
        if count is None and initial:
            count = len(split_operands(initial.strip("{} \t\n")))
        variables.append(
            Variable(
                space=match["space"],
                name=item["name"],
                type=match["type"],
                align=int(align[1]) if align else size,
                count=count,
                vector=int(vector[1]) if vector else 1,
                parameterized=int(item["many"] or 0),
                initial=initial,
                external=".extern" in match["mods"],
            )
        )
    return variables


def parse_body(body: str, first_line: int) -> list[Statement]:
    """Split a function body, comments already blanked. Raises PtxError."""
    starts = [match.end() for match in re.finditer("\n", body)]
    statements: list[Statement] = []
    position, end = 0, len(body.rstrip())
    while position < end:
        match = _STATEMENT.match(body, position)
        if not match:
            line = first_line + bisect_right(starts, _skip(body, position))
            raise PtxError(f"PTX line {line}: expected a statement, got {body[position : position + 60].strip()!r}")
        position = match.end()
        kind = match.lastgroup
        if kind is None:
            continue
        line = first_line + bisect_right(starts, match.start(kind if kind != "operands" else "opcode"))
        if kind == "operands":
            statements.append(
                Statement(
                    "op", line, match["operands"].strip(), match["opcode"], match["guard"] or "", match["not"] == "!"
                )
            )
        elif kind == "label":
            statements.append(Statement("label", line, match["label"]))
        elif kind == "brace":
            statements.append(Statement("open" if match["brace"] == "{" else "close", line))
        else:
            statements.extend(_body_directive(match["directive"], match["rest"], line))
    return statements


def _body_directive(directive: str, rest: str, line: int) -> list[Statement]:
    if directive in (".reg", ".local", ".shared", ".param", ".global", ".const", ".extern"):
        return [Statement("var", line, variable=v) for v in parse_variables(directive + rest, line)]
    if directive in (".branchtargets", ".calltargets"):
        return [Statement("targets", line, names=tuple(part.strip() for part in rest.split(",")))]
    return []  # .pragma, .callprototype, .noreturn: hints
