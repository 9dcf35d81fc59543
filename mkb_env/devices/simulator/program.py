"""Turns one entry of a module into a flat list of instructions and basic blocks.

Names are resolved (scopes, parameters, variables), device functions are inlined, blocks get their liveness. What an
instruction means is decided in :mod:`~mkb_env.devices.simulator.decode`, when its block is first executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.instructions import (
    SHARED_BASE,
    Instruction,
    Many,
    Memory,
    Not,
    Program,
    Register,
    Special,
    Symbol,
    Value,
)
from mkb_env.devices.simulator.operands import Address, Group, Imm, Name, Operand, Pair, Vector
from mkb_env.devices.simulator.parser import TYPE_BYTES, Function, Module, Statement, Variable

MAX_INLINE_DEPTH = 32
MAX_INSTRUCTIONS = 2_000_000
SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(?:\.[xyzw])?|laneid|warpid|nwarpid"
    r"|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|is_explicit_cluster|lanemask_(?:eq|le|lt|ge|gt)|clock|clock_hi"
    r"|clock64|globaltimer|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size|aggr_smem_size"
    r"|reserved_smem_offset_(?:begin|end|cap|0|1)|pm\d+|envreg\d+|current_graph_exec)$"
)


@dataclass
class Scope:
    """Names declared in one pair of braces."""

    parent: Scope | None
    names: dict[str, Value] = field(default_factory=dict)
    families: dict[str, tuple[int, Variable]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def build(module: Module, entry: str, address_of: Callable[[Variable], int]) -> Program:
    """Resolve ``entry``. ``address_of`` places a module-scope global or constant variable in memory.

    Raises:
        DeviceFault: ``launch_error`` if there is no such entry, ``unsupported`` for code that cannot be resolved.
        PtxError: for text that does not parse.
    """
    function = module.functions.get(entry)
    if function is None or not function.entry or function.body is None:
        names = ", ".join(f.name for f in module.entries) or "none"
        raise DeviceFault("launch_error", f"the image has no kernel {entry!r}; it has: {names}", entry)
    return _Builder(module, function, address_of).build()


class _Builder:
    def __init__(self, module: Module, function: Function, address_of: Callable[[Variable], int]) -> None:
        self.module, self.function, self.address_of = module, function, address_of
        offsets, at = [], 0
        for variable in function.params:
            at = _align(at, variable.align)
            offsets.append(at)
            at += variable.nbytes
        self.program = Program(function.name, function.params, tuple(offsets), at, function.directives)
        self.targets: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.shared: dict[str, Symbol] = {}
        self.dynamic: list[tuple[str, int]] = []
        self.unique = 0

    def build(self) -> Program:
        program = self.program
        scope = Scope(None)
        for variable, offset in zip(program.params, program.param_offsets, strict=True):
            scope.names[variable.name] = Symbol("param", offset, variable.name)
        self._scan_shared()
        self.emit(self.function, scope, "", 0)
        self._append(Instruction("exit", self.function.line, "exit", None, False, (), ("exit",)))
        for instruction in program.instructions:
            labels = instruction.labels
            if instruction.name == "brx":
                labels = self.tables.get(labels[0], ())
            missing = [label for label in labels if label not in self.targets]
            if missing:
                raise program.fail(instruction.line, f"branch to the unknown label {missing[0].split('@')[0]}")
            instruction.targets = tuple(self.targets[label] for label in labels)
        self.program.labels = set(self.targets.values())
        return program

    def _scan_shared(self) -> None:
        """Place the shared variables that the code names: static ones in order, then all dynamic ones."""
        self.at_shared = SHARED_BASE
        names = set(re.findall(r"[A-Za-z_$%][\w$]*", self.function.body or ""))
        for function in self.module.functions.values():
            if not function.entry and function.name in names:
                names |= set(re.findall(r"[A-Za-z_$%][\w$]*", function.body or ""))
        variables = [v for v in self.module.variables.values() if v.space == "shared" and v.name in names]
        for statement in self.function.statements:
            if statement.variable is not None and statement.variable.space == "shared":
                variables.append(statement.variable)
        for variable in variables:
            if variable.count is not None and not variable.external:
                self._place_shared(variable)
        align = 16
        for variable in variables:
            if variable.count is None or variable.external:
                align = max(align, variable.align)
                self.dynamic.append((variable.name, variable.align))
        start = _align(self.at_shared, align) if self.dynamic else self.at_shared
        for name, _ in self.dynamic:
            self.shared[name] = Symbol("shared", start, name)
        self.program.static_shared = start - SHARED_BASE

    def _place_shared(self, variable: Variable) -> Symbol:
        self.at_shared = _align(self.at_shared, variable.align)
        symbol = Symbol("shared", self.at_shared, variable.name)
        self.at_shared += variable.nbytes
        self.shared[variable.name] = symbol
        return symbol

    def emit(self, function: Function, scope: Scope, end: str, depth: int) -> None:
        """Append a function's body; ``ret`` goes to the label ``end``, or ends the thread if that is empty."""
        statements = function.statements
        scope = Scope(scope)
        self._declare_labels(statements, 0, scope)
        for position, statement in enumerate(statements):
            if len(self.program.instructions) > MAX_INSTRUCTIONS:
                raise self.program.fail(statement.line, f"more than {MAX_INSTRUCTIONS} instructions after inlining")
            if statement.kind == "open":
                scope = Scope(scope)
                self._declare_labels(statements, position + 1, scope)
            elif statement.kind == "close":
                if scope.parent is None:
                    raise self.program.fail(statement.line, "unbalanced braces")
                scope = scope.parent
            elif statement.kind == "label":
                self.targets[scope.labels[statement.text]] = len(self.program.instructions)
                if position + 1 < len(statements) and statements[position + 1].kind == "targets":
                    names = statements[position + 1].names
                    table = tuple(_label(scope, name) for name in names)
                    self.tables[scope.labels[statement.text]] = table
            elif statement.kind == "var":
                assert statement.variable is not None
                self._declare(statement.variable, scope)
            elif statement.kind == "op":
                self._instruction(statement, scope, end, depth)

    def _declare_labels(self, statements: list[Statement], position: int, scope: Scope) -> None:
        """Give the labels of the scope that starts at ``position`` unique names."""
        depth = 0
        for statement in statements[position:]:
            depth += (statement.kind == "open") - (statement.kind == "close")
            if depth < 0:
                return
            if depth == 0 and statement.kind == "label":
                self.unique += 1
                scope.labels[statement.text] = f"{statement.text}@{self.unique}"

    def _declare(self, variable: Variable, scope: Scope) -> None:
        program = self.program
        if variable.space == "reg":
            if variable.vector > 1:
                raise program.fail(0, f"vector register {variable.name}")
            if variable.parameterized:
                scope.families[variable.name] = (program.registers, variable)
                program.registers += variable.parameterized
                program.widths += [(TYPE_BYTES[variable.type], variable.type == "pred")] * variable.parameterized
            else:
                scope.names[variable.name] = _register(program.registers, variable)
                program.registers += 1
                program.widths.append((TYPE_BYTES[variable.type], variable.type == "pred"))
        elif variable.space in ("local", "param"):
            program.local_bytes = _align(program.local_bytes, variable.align)
            scope.names[variable.name] = Symbol("local", program.local_bytes, variable.name)
            program.local_bytes += variable.nbytes
        elif variable.space == "shared":
            scope.names[variable.name] = self.shared.get(variable.name) or self._place_shared(variable)
            program.static_shared = max(program.static_shared, self.at_shared - SHARED_BASE)
        else:
            scope.names[variable.name] = Symbol(variable.space, self.address_of(variable), variable.name)

    def _instruction(self, statement: Statement, scope: Scope, end: str, depth: int) -> None:
        operands = statement.operands
        parts = tuple(statement.opcode.replace("::", "~").split("."))
        parts = tuple(part.replace("~", "::") for part in parts)
        guard = None
        if statement.guard:
            value = self._name(Name(statement.guard), scope, statement.line)
            if not isinstance(value, Register) or not value.predicate:
                raise self.program.fail(statement.line, f"guard {statement.guard} is not a predicate")
            guard = value
        text = f"{statement.opcode} {statement.text};" if statement.text else f"{statement.opcode};"
        if statement.guard:
            text = f"@{'!' * statement.negated}{statement.guard} {text}"
        text = re.sub(r"\s+", " ", text)
        instruction = Instruction(statement.opcode, statement.line, text, guard, statement.negated, (), parts)
        if parts[0] == "call":
            self._call(instruction, operands, scope, depth)
            return
        if parts[0] == "bra":
            assert isinstance(operands[0], Name)
            instruction.labels = (_label(scope, operands[0].text),)
        elif parts[0] == "brx":
            assert isinstance(operands[1], Name)
            instruction.labels = (_label(scope, operands[1].text),)
            instruction.operands = (self._resolve(operands[0], scope, statement.line),)
        elif parts[0] == "ret" and end:
            instruction.parts, instruction.labels = ("bra",), (end,)
        else:
            instruction.operands = tuple(self._resolve(operand, scope, statement.line) for operand in operands)
        self._append(instruction)

    def _append(self, instruction: Instruction) -> None:
        self.program.instructions.append(instruction)

    def _call(self, call: Instruction, operands: tuple[Operand, ...], scope: Scope, depth: int) -> None:
        """Inline a device function, or leave a call of one without a body (``vprintf``) for the decoder."""
        results: tuple[Operand, ...] = ()
        rest = list(operands)
        if isinstance(rest[0], Group):
            results = rest.pop(0).items  # type: ignore[union-attr]
        callee = rest[0]
        arguments = rest[1].items if len(rest) > 1 and isinstance(rest[1], Group) else ()
        function = self.module.functions.get(callee.text) if isinstance(callee, Name) else None
        if function is None or function.body is None or depth >= MAX_INLINE_DEPTH or call.guard is not None:
            why = "indirect" if function is None else "deep" if depth >= MAX_INLINE_DEPTH else "plain"
            name = callee.text if isinstance(callee, Name) else "?"
            values = tuple(self._resolve(item, scope, call.line) for item in (*results, *arguments))
            call.operands, call.parts = values, ("call", why, name)
            self._append(call)
            return
        if len(arguments) != len(function.params) or len(results) != len(function.results):
            raise self.program.fail(call.line, f"call of {function.name} with the wrong number of arguments")
        inner = Scope(None)
        for variable, operand in zip((*function.params, *function.results), (*arguments, *results), strict=True):
            value = self._resolve(operand, scope, call.line)
            assert value is not None
            inner.names[variable.name] = value
        self.unique += 1
        end = f"return@{self.unique}"
        self.emit(function, inner, end, depth + 1)
        self.targets[end] = len(self.program.instructions)

    def _resolve(self, operand: Operand, scope: Scope, line: int) -> Value | None:
        if isinstance(operand, Name):
            return None if operand.text == "_" else self._name(operand, scope, line)
        if isinstance(operand, Imm):
            return operand
        if isinstance(operand, Address):
            base = self._name(operand.base, scope, line) if operand.base else None
            extra = tuple(self._resolve(item, scope, line) for item in operand.extra)
            if base is not None and not isinstance(base, Register | Symbol):
                raise self.program.fail(line, f"{operand.base} is not an address")
            return Memory(base, operand.offset, extra)  # type: ignore[arg-type]
        if isinstance(operand, Vector | Group):
            return Many(tuple(self._resolve(item, scope, line) for item in operand.items))
        if isinstance(operand, Pair):
            items = (operand.first, operand.second)
            return Many(tuple(self._resolve(item, scope, line) for item in items), pair=True)
        value = self._name(operand.name, scope, line)
        if not isinstance(value, Register):
            raise self.program.fail(line, f"!{operand.name.text} is not a predicate")
        return Not(value)

    def _name(self, name: Name, scope: Scope | None, line: int) -> Value:
        text = name.text
        while scope is not None:
            if text in scope.names:
                value = scope.names[text]
                return _offset(value, name.offset)
            if scope.families and text[-1].isdigit():
                stem = text.rstrip("0123456789")
                number = int(text[len(stem) :])
                family = scope.families.get(stem)
                if family and number < family[1].parameterized:
                    value = _register(family[0] + number, family[1])
                    scope.names[text] = value
                    return value
            scope = scope.parent
        if text in self.shared:
            return _offset(self.shared[text], name.offset)
        if text in self.module.variables:
            variable = self.module.variables[text]
            return Symbol(variable.space, self.address_of(variable) + name.offset, text)
        if text.startswith("%") and SPECIAL.match(text):
            return Special(text[1:])
        if text in self.module.functions:
            return Symbol("function", 0, text)
        raise self.program.fail(line, f"unknown name {text!r}")


def _offset(value: Value, offset: int) -> Value:
    return Symbol(value.space, value.value + offset, value.name) if offset and isinstance(value, Symbol) else value


def _label(scope: Scope | None, name: str) -> str:
    """The unique name of a label; an undeclared one stays as it is and fails when targets are filled in."""
    while scope is not None:
        if name in scope.labels:
            return scope.labels[name]
        scope = scope.parent
    return name


def _register(index: int, variable: Variable) -> Register:
    return Register(index, TYPE_BYTES[variable.type], variable.type == "pred")


def _align(value: int, align: int) -> int:
    return -(-value // align) * align
