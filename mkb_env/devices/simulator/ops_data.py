"""Moves, conversions, comparisons and selection (PTX ISA 9.7.6, 9.7.7, 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mkb_env.devices.simulator import convert
from mkb_env.devices.simulator.decode import (
    Array,
    Operation,
    Unsupported,
    constant,
    last_type,
    opcode,
    pair,
    reader,
    unsigned,
    writer,
)
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction, Many, Register, Symbol, Value
from mkb_env.devices.simulator.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from mkb_env.devices.simulator.operands import Imm
from mkb_env.devices.simulator.ops_float import FLOATS, float_reader
from mkb_env.devices.simulator.parser import TYPE_BYTES


@opcode("mov")
def _mov(instruction: Instruction) -> Operation:
    kind = last_type(instruction)
    destination, source = instruction.operands
    if isinstance(destination, Many):
        return _unpack(destination, source, kind)
    if isinstance(source, Many):
        return _pack(destination, source, kind)
    read, write = reader(source, kind), writer(destination, kind)
    return lambda frame: write(frame, read(frame))


def _element_kind(kind: str, count: int) -> str:
    nbytes = TYPE_BYTES[kind] // count
    if nbytes == 0 or nbytes * count != TYPE_BYTES[kind]:
        raise Unsupported(f"{count} elements in {kind}")
    return f"b{nbytes * 8}"


def _pack(destination: Value | None, source: Many, kind: str) -> Operation:
    """``mov.b64 d, {low, high}``: the first element is the least significant."""
    count = len(source.items)
    element = _element_kind(kind, count)
    reads = [reader(item, element) for item in source.items]
    write = writer(destination, kind)
    wide = unsigned(TYPE_BYTES[kind]) if TYPE_BYTES[kind] <= 8 else np.uint64
    step = 8 * TYPE_BYTES[element]
    per_word = count if TYPE_BYTES[kind] <= 8 else count // 2

    def words(frame: Frame, start: int) -> Array:
        result = reads[start](frame).astype(wide)
        for number in range(1, per_word):
            result = result | (reads[start + number](frame).astype(wide) << wide(step * number))
        return result

    if TYPE_BYTES[kind] <= 8:
        return lambda frame: write(frame, words(frame, 0))

    def operation(frame: Frame) -> None:
        low, high = np.broadcast_arrays(words(frame, 0), words(frame, per_word))
        write(frame, np.stack((low, high), axis=1))

    return operation


def _unpack(destination: Many, source: Value | None, kind: str) -> Operation:
    count = len(destination.items)
    element = _element_kind(kind, count)
    read = reader(source, kind)
    writes = [writer(item, element) for item in destination.items]
    narrow = unsigned(TYPE_BYTES[element])
    step = 8 * TYPE_BYTES[element]

    def operation(frame: Frame) -> None:
        value = read(frame)
        if value.ndim == 2:
            words = [np.ascontiguousarray(value[:, 0]), np.ascontiguousarray(value[:, 1])]
        else:
            words = [value]
        per_word = count // len(words)
        for number, (write, item) in enumerate(zip(writes, destination.items, strict=True)):
            if item is None:
                continue
            word = words[number // per_word]
            shift = step * (number % per_word)
            part = word >> word.dtype.type(shift) if shift else word
            write(frame, part.astype(narrow))

    return operation


@opcode("cvt")
def _cvt(instruction: Instruction) -> Operation:
    parts = instruction.parts
    types = [part for part in parts[1:] if part in TYPE_BYTES or part in _NARROW]
    if len(types) < 2:
        raise Unsupported("expected two types")
    target, source = types[0], types[1]
    rounding = next((p for p in parts if p in ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")), None)
    options = {name: name in parts for name in ("ftz", "sat", "relu", "satfinite")}
    if "rs" in parts or "scaled" in parts:
        raise Unsupported("this rounding")
    if target.endswith("x2"):
        return _cvt_packed(instruction, target[:-2], source, rounding or "rn", options["relu"], options["satfinite"])
    if "pack" in parts:
        return _cvt_pack(instruction, target)
    read = reader(instruction.operands[1], f"b{8 * TYPE_BYTES[source]}")
    write = writer(instruction.operands[0], target if target[0] in "su" else f"b{8 * TYPE_BYTES[target]}")
    if not any(options.values()):
        return lambda frame: write(frame, convert.cvt(read(frame), source, target, rounding))
    return lambda frame: write(frame, convert.cvt(read(frame), source, target, rounding, **options))


def _cvt_pack(instruction: Instruction, target: str) -> Operation:
    """``cvt.pack.sat``: two s32 clamped to ``target``, above (4- and 8-bit targets) the low bits of c, shifted up."""
    width = {"u16": 16, "s16": 16, "u8": 8, "s8": 8}.get(target)
    if width is None:
        raise Unsupported(f"cvt.pack to {target}")
    low, high = (0, (1 << width) - 1) if target[0] == "u" else (-(1 << (width - 1)), (1 << (width - 1)) - 1)
    a, b = (reader(operand, "s32") for operand in instruction.operands[1:3])
    c = reader(instruction.operands[3], "u32") if len(instruction.operands) > 3 else None
    write = writer(instruction.operands[0], "b32")

    def field(value: Array) -> Array:
        return (np.clip(value.astype(np.int64), low, high) & ((1 << width) - 1)).astype(np.uint32)

    def operation(frame: Frame) -> None:
        result = (field(a(frame)) << np.uint32(width)) | field(b(frame))
        if c is not None:
            result = result | (c(frame) << np.uint32(2 * width))
        write(frame, result)

    return operation


_NARROW = {"e2m1x2": 1, "e3m2x2": 2, "e2m3x2": 2, "ue8m0x2": 2}


def _cvt_packed(
    instruction: Instruction, target: str, source: str, rounding: str, relu: bool, satfinite: bool
) -> Operation:
    """``cvt`` to two narrow numbers: of two f32 registers, or of one packed register."""
    container = {"e2m1": "b8", "e4m3": "b16", "e5m2": "b16", "e3m2": "b16", "e2m3": "b16", "ue8m0": "b16"}.get(
        target, "b32"
    )
    write = writer(instruction.operands[0], container)
    if source.endswith("x2"):
        width = {"f16x2": "b32", "bf16x2": "b32", "e2m1x2": "b8"}.get(source, "b16")
        read = reader(instruction.operands[1], width)
        one = source[:-2]
        return lambda frame: write(frame, convert.cvt_packed(read(frame), one, target, rounding, relu, satfinite))
    a, b = (reader(operand, f"b{8 * TYPE_BYTES[source]}") for operand in instruction.operands[1:3])
    return lambda frame: write(
        frame, convert.pack2(a(frame), b(frame), source, target, rounding, relu=relu, satfinite=satfinite)
    )


_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}


def _space(parts: tuple[str, ...]) -> str:
    for part in parts:
        space = part.split("::")[0]
        if space in ("shared", "local", "param", "global", "const"):
            return space
    return ""


@opcode("cvta")
def _cvta(instruction: Instruction) -> Operation:
    kind, space = last_type(instruction), _space(instruction.parts)
    destination, source = instruction.operands
    read, write = reader(source, kind), writer(destination, kind)
    if isinstance(source, Symbol) and source.space == "local":
        space = "local"
    window = _WINDOWS.get(space)
    if window is None:
        return lambda frame: write(frame, read(frame))
    if kind != "u64":
        raise Unsupported("32-bit generic addresses")
    base = np.uint64(window)
    if "to" in instruction.parts:
        return lambda frame: write(frame, read(frame) - base)
    return lambda frame: write(frame, read(frame) + base)


@opcode("isspacep")
def _isspacep(instruction: Instruction) -> Operation:
    space = _space(instruction.parts)
    read, write = reader(instruction.operands[1], "u64"), writer(instruction.operands[0], "pred")
    first = _WINDOWS.get(space)

    def operation(frame: Frame) -> None:
        value = read(frame)
        if first is None:
            inside = value >= np.uint64(PARAM_WINDOW + WINDOW_BYTES)
        else:
            inside = (value >= np.uint64(first)) & (value < np.uint64(first + WINDOW_BYTES))
        write(frame, inside)

    return operation


Compare = Callable[[Array, Array], Array]
_ORDERED: dict[str, Compare] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_BOOLEAN: dict[str, Compare] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, kind: str, ftz: bool) -> Compare:
    """The comparison of a ``setp`` or ``set``. Ordered ones are false with a NaN, unordered ones true."""
    floating = kind in FLOATS
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name in _UNORDERED:
        base = _ORDERED[_UNORDERED[name]]
        compare: Compare = lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
    elif name == "ne" and floating:
        compare = lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)  # noqa: E731
    else:
        compare = _ORDERED[name]
    if ftz and floating:
        plain = compare
        return lambda a, b: plain(convert.flush(a), convert.flush(b))
    return compare


def _compared(instruction: Instruction) -> tuple[Callable[[Frame], Array], Compare | None, str]:
    """The comparison of ``setp``/``set``, the boolean operator on top of it, and the type compared."""
    parts = instruction.parts
    kind = last_type(instruction)
    name = next((part for part in parts[1:] if part in _ORDERED or part in _UNORDERED or part in ("num", "nan")), "")
    boolean = next((_BOOLEAN[part] for part in parts[1:] if part in _BOOLEAN), None)
    unsigned_kind = f"u{8 * TYPE_BYTES[kind]}"
    if kind not in FLOATS and name in ("lo", "ls", "hi", "hs"):
        kind = unsigned_kind
    a, b = (
        float_reader(operand, kind) if kind in FLOATS else reader(operand, kind)
        for operand in instruction.operands[1:3]
    )
    compare = comparison(name, kind, "ftz" in parts)
    return (lambda frame: compare(a(frame), b(frame))), boolean, kind


@opcode("setp")
def _setp(instruction: Instruction) -> Operation:
    compare, boolean, kind = _compared(instruction)
    first, second = pair(instruction.operands[0])
    write = writer(first, "pred")
    if kind.endswith("x2"):
        low, high = writer(first, "pred"), writer(second, "pred")
        third = reader(instruction.operands[3], "pred") if boolean is not None else None

        def packed(frame: Frame) -> None:
            result = compare(frame)
            if boolean is not None and third is not None:
                result = boolean(result, third(frame)[:, None])
            low(frame, np.ascontiguousarray(result[:, 0]))
            high(frame, np.ascontiguousarray(result[:, 1]))

        return packed
    if boolean is None and second is None:
        return lambda frame: write(frame, compare(frame))
    other = writer(second, "pred")
    combine = boolean
    extra = reader(instruction.operands[3], "pred") if boolean is not None else None

    def operation(frame: Frame) -> None:
        result = compare(frame)
        inverse = ~result
        if combine is not None and extra is not None:
            value = extra(frame)
            result, inverse = combine(result, value), combine(inverse, value)
        write(frame, result)
        other(frame, inverse)

    return operation


@opcode("set")
def _set(instruction: Instruction) -> Operation:
    types = [part for part in instruction.parts[1:] if part in TYPE_BYTES]
    target = types[0]
    compare, boolean, kind = _compared(instruction)
    one = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}.get(target)
    two = kind.endswith("x2")
    bits = "b16" if two else f"b{8 * TYPE_BYTES[target]}"
    if one is None:
        one = (1 << (8 * TYPE_BYTES[bits])) - 1
    true, false = (constant(value, bits) for value in (one, 0))
    write = writer(instruction.operands[0], f"b{8 * TYPE_BYTES[target]}")
    extra = reader(instruction.operands[3], "pred") if boolean is not None else None

    def operation(frame: Frame) -> None:
        result = compare(frame)
        if boolean is not None and extra is not None:
            result = boolean(result, extra(frame)[:, None] if two else extra(frame))
        value = np.where(result, true, false)
        write(frame, value.view(np.uint32).reshape(-1) if two else value)

    return operation


@opcode("selp")
def _selp(instruction: Instruction) -> Operation:
    kind = f"b{8 * TYPE_BYTES[last_type(instruction)]}"
    if kind == "b128":
        raise Unsupported("selp.b128")
    source = instruction.operands[1:3]
    target = last_type(instruction) if any(isinstance(item, Imm) for item in source) else kind
    a, b = (reader(operand, target) for operand in source)
    condition, write = reader(instruction.operands[3], "pred"), writer(instruction.operands[0], target)

    def operation(frame: Frame) -> None:
        holds = condition(frame)
        if len(holds) == 1:
            write(frame, a(frame) if holds[0] else b(frame))
        else:
            write(frame, np.where(holds, a(frame), b(frame)))

    return operation


@opcode("slct")
def _slct(instruction: Instruction) -> Operation:
    types = [part for part in instruction.parts[1:] if part in TYPE_BYTES]
    kind = f"b{8 * TYPE_BYTES[types[0]]}"
    a, b = (reader(operand, kind) for operand in instruction.operands[1:3])
    c, write = reader(instruction.operands[3], types[1]), writer(instruction.operands[0], kind)
    return lambda frame: write(frame, np.where(c(frame) >= 0, a(frame), b(frame)))


@opcode("mapa")
def _mapa(instruction: Instruction) -> Operation:
    """Address of the same variable in another block of the cluster; a cluster here is one block."""
    kind = last_type(instruction)
    read, rank = reader(instruction.operands[1], kind), reader(instruction.operands[2], "u32")
    write = writer(instruction.operands[0], kind)

    def operation(frame: Frame) -> None:
        if rank(frame).any():
            raise Unsupported("mapa to another block of a cluster")
        write(frame, read(frame))

    return operation


@opcode("getctarank")
def _getctarank(instruction: Instruction) -> Operation:
    write = writer(instruction.operands[0], "u32")
    return lambda frame: write(frame, np.zeros(1, np.uint32))


def is_register(value: Value | None) -> bool:
    """Whether an operand is a register."""
    return isinstance(value, Register)
