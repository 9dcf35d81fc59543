"""Integer and logic instructions (PTX ISA 9.7.1, and 9.7.2 extended precision)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mkb_env.devices.simulator.decode import (
    Array,
    Operation,
    Reader,
    Unsupported,
    last_type,
    numpy_type,
    opcode,
    reader,
    unsigned,
    writer,
)
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction
from mkb_env.devices.simulator.parser import TYPE_BYTES

Binary = Callable[[Array, Array], Array]
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
CARRY = 0
"""Number of the register that holds the carry flag."""


def bits_of(kind: str) -> int:
    return TYPE_BYTES[kind] * 8


def binary(instruction: Instruction, kind: str, compute: Binary, second: str = "") -> Operation:
    """``d = compute(a, b)`` with operands of ``kind`` (``second`` for b, where it differs)."""
    destination, first, other = instruction.operands
    a, b, write = reader(first, kind), reader(other, second or kind), writer(destination, kind)

    def operation(frame: Frame) -> None:
        write(frame, compute(a(frame), b(frame)))

    return operation


def unary(instruction: Instruction, kind: str, compute: Callable[[Array], Array], result: str = "") -> Operation:
    """``d = compute(a)``."""
    a, write = reader(instruction.operands[1], kind), writer(instruction.operands[0], result or kind)

    def operation(frame: Frame) -> None:
        write(frame, compute(a(frame)))

    return operation


def readers(instruction: Instruction, *kinds: str) -> list[Reader]:
    """Readers of the operands after the destination."""
    return [reader(operand, kind) for operand, kind in zip(instruction.operands[1:], kinds, strict=False)]


def saturated_sum(compute: Binary) -> Binary:
    """Signed 32-bit sum or difference, clamped."""
    return lambda a, b: np.clip(compute(a.astype(np.int64), b.astype(np.int64)), -(2**31), 2**31 - 1).astype(np.int32)


def packed(instruction: Instruction, kind: str, compute: Binary) -> Operation:
    """``d = compute(a, b)`` on both 16-bit halves."""
    half = numpy_type(kind.removesuffix("x2"))
    limits = np.iinfo(half)
    clamp = "sat" in instruction.parts

    def both(a: Array, b: Array) -> Array:
        x, y = (np.ascontiguousarray(value).view(half).reshape(-1, 2).astype(np.int32) for value in (a, b))
        result = compute(x, y)
        if clamp:
            result = np.clip(result, limits.min, limits.max)
        return np.ascontiguousarray(result.astype(half)).view(np.uint32).reshape(-1)

    return binary(instruction, "b32", both)


def add_sub(instruction: Instruction) -> Operation:
    """Integer ``add``, ``sub``, with carry out or saturation."""
    kind = last_type(instruction)
    compute: Binary = np.add if instruction.name == "add" else np.subtract
    if "cc" in instruction.parts:
        return _carrying(instruction, kind, carry_in=False)
    if "sat" in instruction.parts:
        return binary(instruction, "s32", saturated_sum(compute))
    if kind.endswith("x2"):
        return packed(instruction, kind, compute)
    # Two's complement: the raw bits give the same sum.
    return binary(instruction, f"u{bits_of(kind)}", compute)


@opcode("addc", "subc")
def _add_with_carry(instruction: Instruction) -> Operation:
    return _carrying(instruction, last_type(instruction), carry_in=True)


def _carrying(instruction: Instruction, kind: str, carry_in: bool) -> Operation:
    """Sum or difference with the carry flag; the flag holds the borrow after a subtraction."""
    kind = f"u{bits_of(kind)}"
    a, b = readers(instruction, kind, kind)
    write = writer(instruction.operands[0], kind)
    subtract, out = instruction.name.startswith("sub"), "cc" in instruction.parts

    def operation(frame: Frame) -> None:
        x, y = a(frame), b(frame)
        flag = frame.registers[CARRY] if carry_in else np.zeros(1, bool)
        partial = x - y if subtract else x + y
        carry = partial > x if subtract else partial < x
        total = partial - flag.astype(x.dtype) if subtract else partial + flag.astype(x.dtype)
        carry = carry | ((total > partial) if subtract else (total < partial))
        write(frame, total)
        if out:
            frame.registers[CARRY] = carry

    return operation


def multiply(instruction: Instruction) -> Operation:
    """Integer ``mul.lo``, ``mul.hi``, ``mul.wide``."""
    kind = last_type(instruction)
    if "wide" in instruction.parts:
        wide = WIDER[kind]
        target = numpy_type(wide)
        a, b = readers(instruction, kind, kind)
        write = writer(instruction.operands[0], wide)

        def operation(frame: Frame) -> None:
            write(frame, np.multiply(a(frame), b(frame), dtype=target))

        return operation
    if "hi" in instruction.parts:
        return binary(instruction, kind, lambda a, b: high_product(a, b, kind))
    return binary(instruction, f"u{bits_of(kind)}", np.multiply)


def high_product(a: Array, b: Array, kind: str) -> Array:
    """Upper half of the double-width product."""
    if kind in WIDER:
        wide = np.multiply(a, b, dtype=numpy_type(WIDER[kind]))
        return (wide >> wide.dtype.type(bits_of(kind))).astype(a.dtype)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x0, x1, y0, y1 = x & mask, x >> half, y & mask, y >> half
    middle = (x0 * y0 >> half) + (x1 * y0 & mask) + x0 * y1
    # middle may wrap: x0*y1 <= (2^32-1)^2, the two others add less than 2^33.
    wrapped = (middle < x0 * y1).astype(np.uint64)
    upper = x1 * y1 + (x1 * y0 >> half) + (middle >> half) + (wrapped << half)
    if kind == "s64":
        upper = upper - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return upper.view(a.dtype)


@opcode("mul24", "mad24")
def _mul24(instruction: Instruction) -> Operation:
    kind = last_type(instruction)
    upper = "hi" in instruction.parts
    if "sat" in instruction.parts:
        raise Unsupported("mad24.hi.sat")
    shift = np.int64(40)

    def low24(a: Array) -> Array:
        return a.astype(np.int64) & np.int64(0xFFFFFF) if kind == "u32" else (a.astype(np.int64) << shift) >> shift

    def product(a: Array, b: Array) -> Array:
        """The lower or upper 32 bits of the 48-bit product."""
        whole = low24(a) * low24(b)
        return (whole >> np.int64(16) if upper else whole).astype(a.dtype)

    if instruction.name == "mul24":
        return binary(instruction, kind, product)
    return _ternary(instruction, kind, lambda a, b, c: product(a, b) + c)


def _ternary(
    instruction: Instruction, kind: str, compute: Callable[[Array, Array, Array], Array], third: str = ""
) -> Operation:
    a, b, c = readers(instruction, kind, kind, third or kind)
    write = writer(instruction.operands[0], third or kind)

    def operation(frame: Frame) -> None:
        write(frame, compute(a(frame), b(frame), c(frame)))

    return operation


def multiply_add(instruction: Instruction) -> Operation:
    """Integer ``mad``."""
    kind = last_type(instruction)
    parts = instruction.parts
    if "cc" in parts:
        return _mad_carry(instruction, kind, carry_in=False)
    if "wide" in parts:
        wide = numpy_type(WIDER[kind])
        return _ternary(instruction, kind, lambda a, b, c: np.multiply(a, b, dtype=wide) + c, WIDER[kind])
    if "hi" in parts:
        if "sat" in parts:
            wide_clip = np.int64
            return _ternary(
                instruction,
                "s32",
                lambda a, b, c: np.clip(
                    high_product(a, b, "s32").astype(wide_clip) + c.astype(wide_clip), -(2**31), 2**31 - 1
                ).astype(np.int32),
            )
        return _ternary(instruction, kind, lambda a, b, c: high_product(a, b, kind) + c)
    return _ternary(instruction, f"u{bits_of(kind)}", lambda a, b, c: a * b + c)


@opcode("madc")
def _madc(instruction: Instruction) -> Operation:
    return _mad_carry(instruction, last_type(instruction), carry_in=True)


def _mad_carry(instruction: Instruction, kind: str, carry_in: bool) -> Operation:
    a, b, c = readers(instruction, kind, kind, kind)
    write, high, out = writer(instruction.operands[0], kind), "hi" in instruction.parts, "cc" in instruction.parts
    raw = unsigned(TYPE_BYTES[kind])

    def operation(frame: Frame) -> None:
        x, y = a(frame), b(frame)
        product = (high_product(x, y, kind) if high else x * y).view(raw)
        partial = product + c(frame).view(raw)
        carry = partial < product
        flag = frame.registers[CARRY] if carry_in else np.zeros(1, bool)
        total = partial + flag.astype(raw)
        write(frame, total)
        if out:
            frame.registers[CARRY] = carry | (total < partial)

    return operation


@opcode("sad")
def _sad(instruction: Instruction) -> Operation:
    kind = last_type(instruction)
    return _ternary(instruction, kind, lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)))


def divide(instruction: Instruction) -> Operation:
    """Integer ``div``: towards zero; all ones for a zero divisor, as the hardware's sequence gives."""
    return binary(instruction, last_type(instruction), quotient)


@opcode("rem")
def _rem(instruction: Instruction) -> Operation:
    def remainder(a: Array, b: Array) -> Array:
        return np.where(b == 0, a, a - quotient(a, b) * b)

    return binary(instruction, last_type(instruction), remainder)


def quotient(a: Array, b: Array) -> Array:
    """Quotient rounded towards zero; all ones where ``b`` is 0; the lowest number divided by -1 is itself."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        result = a // safe
        return np.where(zero, ~a.dtype.type(0), result)
    # Work on magnitudes as unsigned numbers: the lowest number has one there.
    raw = unsigned(a.dtype.itemsize)
    magnitude = np.abs(a).view(raw) // np.abs(safe).view(raw)
    signed = magnitude.view(a.dtype)
    return np.where(zero, a.dtype.type(-1), np.where((a < 0) != (b < 0), -signed, signed))


def minimum_maximum(instruction: Instruction) -> Operation:
    """Integer ``min`` and ``max``."""
    compute: Binary = np.minimum if instruction.name == "min" else np.maximum
    kind, plain = last_type(instruction), compute
    if "relu" in instruction.parts:
        compute = lambda a, b: np.maximum(plain(a, b), a.dtype.type(0))  # noqa: E731
    return packed(instruction, kind, compute) if kind.endswith("x2") else binary(instruction, kind, compute)


def absolute(instruction: Instruction) -> Operation:
    return unary(instruction, last_type(instruction), np.abs)


def negate(instruction: Instruction) -> Operation:
    return unary(instruction, last_type(instruction), np.negative)
