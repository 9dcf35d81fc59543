"""Floating-point instructions (PTX ISA 9.7.3 to 9.7.5), and the opcodes they share with integers.

The arithmetic itself is in :mod:`~mkb_env.devices.simulator.numerics`. Packed types are arrays of shape (lanes, 2);
bf16 travels as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mkb_env.devices.simulator import convert, numerics, ops_integer
from mkb_env.devices.simulator.decode import Array, Operation, Reader, Unsupported, Writer, opcode, reader, writer
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction, Value
from mkb_env.devices.simulator.parser import TYPE_BYTES

FLOATS = frozenset({"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"})
ROUNDINGS = frozenset({"rn", "rz", "rm", "rp"})


def float_kind(instruction: Instruction) -> str | None:
    """The floating-point type of an opcode, or None if it works on integers."""
    found = [part for part in instruction.parts[1:] if part in TYPE_BYTES]
    return found[-1] if found and found[-1] in FLOATS else None


def values(bits: Array, kind: str) -> Array:
    """Raw bits as floats: float16, float32 (also for bf16) or float64; packed kinds get a second axis of 2."""
    match kind:
        case "f16":
            return bits.view(np.float16)
        case "f32":
            return bits.view(np.float32)
        case "f64":
            return bits.view(np.float64)
        case "bf16":
            return convert.bf16_to_f32(bits)
        case "f16x2":
            return np.ascontiguousarray(bits).view(np.float16).reshape(-1, 2)
        case "f32x2":
            return np.ascontiguousarray(bits).view(np.float32).reshape(-1, 2)
        case "bf16x2":
            return convert.bf16_to_f32(np.ascontiguousarray(bits).view(np.uint16).reshape(-1, 2))
    raise Unsupported(f"arithmetic on {kind}")


def raw(result: Array, kind: str) -> Array:
    """Inverse of :func:`values`; bf16 results must already be rounded to bf16."""
    match kind:
        case "bf16":
            return (result.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        case "bf16x2":
            halves = (np.ascontiguousarray(result).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            return halves.view(np.uint32).reshape(-1)
        case "f16x2":
            return np.ascontiguousarray(result).view(np.uint32).reshape(-1)
        case "f32x2":
            return np.ascontiguousarray(result).view(np.uint64).reshape(-1)
    return result.view(f"u{result.dtype.itemsize}")


def float_reader(value: Value | None, kind: str) -> Reader:
    """Reads an operand as floats."""
    if kind in ("f16", "f32", "f64"):
        return reader(value, kind)
    bits = reader(value, kind)
    return lambda frame: values(bits(frame), kind)


def float_writer(value: Value | None, kind: str) -> Writer:
    """Writes floats to a destination."""
    write = writer(value, kind)
    if kind in ("f16", "f32", "f64"):
        return write
    return lambda frame, result: write(frame, raw(result, kind))


def compute(instruction: Instruction, kind: str, function: Callable[..., Array]) -> Operation:
    """``d = function(a, ...)`` on floats."""
    write = float_writer(instruction.operands[0], kind)
    reads = [float_reader(operand, kind) for operand in instruction.operands[1:]]
    if len(reads) == 1:
        first = reads[0]
        return lambda frame: write(frame, function(first(frame)))
    if len(reads) == 2:
        first, second = reads
        return lambda frame: write(frame, function(first(frame), second(frame)))

    def operation(frame: Frame) -> None:
        a, b, c = (read(frame) for read in reads)
        # The functions of three operands need a * b and c of one shape.
        longest = max(len(a), len(b), len(c))
        if longest > 1:
            if len(c) == 1:
                c = c.repeat(longest, axis=0)
            elif len(a) == len(b) == 1:
                a = a.repeat(longest, axis=0)
        write(frame, function(a, b, c))

    return operation


def modifiers(instruction: Instruction, *allowed: str) -> dict[str, Any]:
    """Keyword arguments for :mod:`numerics` from an opcode's modifiers."""
    parts = instruction.parts
    found: dict[str, Any] = {}
    if "rounding" in allowed:
        rounding = next((part for part in parts if part in ROUNDINGS), "rn")
        found["rounding"] = rounding
    for name in ("ftz", "sat", "relu"):
        if name in allowed and name in parts:
            found[name] = True
    if "bf16" in allowed and (kind := float_kind(instruction)) is not None and kind.startswith("bf16"):
        found["bf16"] = True
    return found


_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": numerics.add,
    "sub": numerics.sub,
    "mul": numerics.mul,
    "fma": numerics.fma,
    "mad": numerics.fma,
}
_INTEGER: dict[str, Callable[[Instruction], Operation]] = {
    "add": ops_integer.add_sub,
    "sub": ops_integer.add_sub,
    "mul": ops_integer.multiply,
    "mad": ops_integer.multiply_add,
}


@opcode("add", "sub", "mul", "fma", "mad")
def _arithmetic(instruction: Instruction) -> Operation:
    kind = float_kind(instruction)
    if kind is None:
        return _INTEGER[instruction.name](instruction)
    if any(part in FLOATS for part in instruction.parts[1:-1]):
        raise Unsupported("mixed-precision arithmetic")
    options = modifiers(instruction, "rounding", "ftz", "sat", "relu", "bf16")
    function = partial(_ARITHMETIC[instruction.name], **options)
    return compute(instruction, kind, function)


@opcode("div")
def _div(instruction: Instruction) -> Operation:
    kind = float_kind(instruction)
    if kind is None:
        return ops_integer.divide(instruction)
    options = modifiers(instruction, "rounding", "ftz")
    approximate, full = "approx" in instruction.parts, "full" in instruction.parts
    return compute(instruction, kind, partial(numerics.div, approx=approximate, full=full, **options))


@opcode("rcp", "sqrt")
def _root_or_reciprocal(instruction: Instruction) -> Operation:
    function = numerics.rcp if instruction.name == "rcp" else numerics.sqrt
    options = modifiers(instruction, "rounding", "ftz")
    kind = float_kind(instruction)
    assert kind is not None
    return compute(instruction, kind, partial(function, approx="approx" in instruction.parts, **options))


_FUNCTIONS: dict[str, tuple[Callable[..., Array], tuple[str, ...]]] = {
    "rsqrt": (numerics.rsqrt, ("ftz",)),
    "ex2": (numerics.ex2, ("ftz", "bf16")),
    "lg2": (numerics.lg2, ("ftz",)),
    "sin": (numerics.sin, ("ftz",)),
    "cos": (numerics.cos, ("ftz",)),
    "tanh": (numerics.tanh, ("bf16",)),
}


@opcode(*_FUNCTIONS)
def _function(instruction: Instruction) -> Operation:
    kind = float_kind(instruction)
    assert kind is not None
    function, allowed = _FUNCTIONS[instruction.name]
    return compute(instruction, kind, partial(function, **modifiers(instruction, *allowed)))


@opcode("min", "max")
def _extreme(instruction: Instruction) -> Operation:
    kind = float_kind(instruction)
    if kind is None:
        return ops_integer.minimum_maximum(instruction)
    function = numerics.minimum if instruction.name == "min" else numerics.maximum
    parts = instruction.parts
    options: dict[str, Any] = {
        "nan": "NaN" in parts,
        "xorsign_abs": "xorsign" in parts,
        "magnitude": "abs" in parts and "xorsign" not in parts,
        "ftz": "ftz" in parts,
    }
    return compute(instruction, kind, partial(function, **options))


def _sign_bits(kind: str) -> tuple[Any, int]:
    """Raw NumPy type of a kind and the mask of its sign bits."""
    masks = {
        "f16": (np.uint16, 0x8000), "bf16": (np.uint16, 0x8000), "f32": (np.uint32, 0x80000000),
        "f64": (np.uint64, 1 << 63),
        "f16x2": (np.uint32, 0x80008000), "bf16x2": (np.uint32, 0x80008000), "f32x2": (np.uint64, 0x8000000080000000),
    }  # fmt: skip
    return masks[kind]


@opcode("neg", "abs")
def _sign(instruction: Instruction) -> Operation:
    kind = float_kind(instruction)
    if kind is None:
        return ops_integer.negate(instruction) if instruction.name == "neg" else ops_integer.absolute(instruction)
    kind_of_bits, mask = _sign_bits(kind)
    sign, ftz = kind_of_bits(mask), "ftz" in instruction.parts
    negate = instruction.name == "neg"
    read, write = reader(instruction.operands[1], _bits(kind)), writer(instruction.operands[0], _bits(kind))

    def operation(frame: Frame) -> None:
        bits = read(frame)
        if ftz:
            bits = raw(convert.flush(values(bits, kind)), kind)
        write(frame, bits ^ sign if negate else bits & ~sign)

    return operation


def _bits(kind: str) -> str:
    return f"b{TYPE_BYTES[kind] * 8}"


@opcode("copysign")
def _copysign(instruction: Instruction) -> Operation:
    kind = float_kind(instruction)
    assert kind is not None
    kind_of_bits, mask = _sign_bits(kind)
    sign = kind_of_bits(mask)
    a, b = (reader(operand, _bits(kind)) for operand in instruction.operands[1:])
    write = writer(instruction.operands[0], _bits(kind))
    return lambda frame: write(frame, (a(frame) & sign) | (b(frame) & ~sign))


@opcode("testp")
def _test_property(instruction: Instruction) -> Operation:
    kind = float_kind(instruction)
    assert kind is not None
    smallest = np.finfo(np.float32 if kind == "f32" else np.float64).smallest_normal
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= smallest),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < smallest),
    }
    test = tests[instruction.parts[1]]
    read, write = float_reader(instruction.operands[1], kind), writer(instruction.operands[0], "pred")
    return lambda frame: write(frame, test(read(frame)))
