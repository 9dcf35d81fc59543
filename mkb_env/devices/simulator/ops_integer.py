"""Integer and logic instructions (PTX ISA 9.7.1, 9.7.2 extended precision, 9.7.8 logic and shift)."""

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
    pair,
    reader,
    unsigned,
    writer,
)
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.parser import TYPE_BYTES, Imm
from mkb_env.devices.simulator.program import Instruction

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


def add_sub(instruction: Instruction) -> Operation:
    """Integer ``add``, ``sub``, with carry out or saturation."""
    kind = last_type(instruction)
    compute: Binary = np.add if instruction.name == "add" else np.subtract
    if "cc" in instruction.parts:
        return _carrying(instruction, kind, carry_in=False)
    if "sat" in instruction.parts:
        return binary(instruction, "s32", saturated_sum(compute))
    if kind in ("u16x2", "s16x2"):
        raise Unsupported("packed 16-bit integers")
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
    if "lo" not in instruction.parts:
        raise Unsupported(f"{instruction.name}.hi")
    shift = np.int64(40)

    def low24(a: Array) -> Array:
        return a.astype(np.int64) & np.int64(0xFFFFFF) if kind == "u32" else (a.astype(np.int64) << shift) >> shift

    if instruction.name == "mul24":
        return binary(instruction, kind, lambda a, b: (low24(a) * low24(b)).astype(a.dtype))
    return _ternary(instruction, kind, lambda a, b, c: (low24(a) * low24(b)).astype(a.dtype) + c)


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
    if "relu" in instruction.parts:
        return binary(instruction, last_type(instruction), lambda a, b: np.maximum(compute(a, b), a.dtype.type(0)))
    return binary(instruction, last_type(instruction), compute)


def absolute(instruction: Instruction) -> Operation:
    return unary(instruction, last_type(instruction), np.abs)


def negate(instruction: Instruction) -> Operation:
    return unary(instruction, last_type(instruction), np.negative)


_LOGIC: dict[str, Binary] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@opcode("and", "or", "xor")
def _logic(instruction: Instruction) -> Operation:
    return binary(instruction, last_type(instruction), _LOGIC[instruction.name])


@opcode("not")
def _not(instruction: Instruction) -> Operation:
    return unary(instruction, last_type(instruction), np.invert)


@opcode("cnot")
def _cnot(instruction: Instruction) -> Operation:
    return unary(instruction, last_type(instruction), lambda a: (a == 0).astype(a.dtype))


@opcode("lop3")
def _lop3(instruction: Instruction) -> Operation:
    """Any function of three bits, as a sum of its minterms; ``immLut`` is the last operand but an optional predicate."""
    if "BOOL" in instruction.opcode or not isinstance(instruction.operands[4], Imm):
        raise Unsupported("lop3 with a predicate result")
    table = instruction.operands[4].value & 0xFF
    a, b, c = readers(instruction, "b32", "b32", "b32")
    write = writer(instruction.operands[0], "b32")

    def operation(frame: Frame) -> None:
        x, y, z = a(frame), b(frame), c(frame)
        result: Array = np.zeros(1, np.uint32)
        for minterm in range(8):
            if table >> minterm & 1:
                term = (x if minterm & 4 else ~x) & (y if minterm & 2 else ~y) & (z if minterm & 1 else ~z)
                result = result | term
        write(frame, result)

    return operation


@opcode("shl", "shr")
def _shift(instruction: Instruction) -> Operation:
    """Shift amounts above the width are clamped to it."""
    kind = last_type(instruction)
    width = bits_of(kind)
    left = instruction.name == "shl"
    shift: Binary = np.left_shift if left else np.right_shift
    if isinstance(instruction.operands[2], Imm) and 0 <= instruction.operands[2].value < width:
        amount = numpy_type(kind)(instruction.operands[2].value)
        return unary(
            Instruction(**{**instruction.__dict__, "operands": instruction.operands[:2]}),
            kind,
            lambda a: shift(a, amount),
        )

    def general(a: Array, b: Array) -> Array:
        over = b >= width
        result = shift(a, np.minimum(b, np.uint32(width - 1)).astype(a.dtype))
        if over.any():
            beyond = a >> a.dtype.type(width - 1) if kind.startswith("s") and not left else a.dtype.type(0)
            result = np.where(over, beyond, result)
        return result

    return binary(instruction, kind, general, "u32")


@opcode("shf")
def _funnel_shift(instruction: Instruction) -> Operation:
    a, b, c = readers(instruction, "u32", "u32", "u32")
    write = writer(instruction.operands[0], "u32")
    left, wrap = "l" in instruction.parts, "wrap" in instruction.parts

    def operation(frame: Frame) -> None:
        joined = (b(frame).astype(np.uint64) << np.uint64(32)) | a(frame)
        amount = c(frame)
        amount = (amount & np.uint32(31) if wrap else np.minimum(amount, np.uint32(32))).astype(np.uint64)
        shifted = (joined << amount) >> np.uint64(32) if left else joined >> amount
        write(frame, shifted.astype(np.uint32))

    return operation


@opcode("bfe")
def _bit_field_extract(instruction: Instruction) -> Operation:
    kind = last_type(instruction)
    a, b, c = readers(instruction, kind, "u32", "u32")
    write, width, signed = writer(instruction.operands[0], kind), bits_of(kind), kind.startswith("s")
    raw = unsigned(width // 8)

    def operation(frame: Frame) -> None:
        value, start, length = a(frame), b(frame) & np.uint32(255), c(frame) & np.uint32(255)
        value, start, length = np.broadcast_arrays(value, start, length)
        inside = np.minimum(start, np.uint32(width - 1)).astype(raw)
        field = np.where(start < width, value.view(raw) >> inside, raw(0))
        full = length >= width
        mask = np.where(full, ~raw(0), (raw(1) << np.where(full, np.uint32(0), length).astype(raw)) - raw(1))
        result = field & mask
        if signed:
            top = np.minimum(start.astype(np.int64) + length - 1, width - 1).clip(0).astype(raw)
            sign = ((value.view(raw) >> top) & raw(1)).astype(bool) & (length > 0)
            available = np.clip(np.int64(width) - start, 0, None)
            kept = np.minimum(length, available)
            whole = kept >= width
            low = np.where(whole, ~raw(0), (raw(1) << np.where(whole, 0, kept).astype(raw)) - raw(1))
            result = np.where(sign, (field & low) | ~low, field & low)
        write(frame, np.ascontiguousarray(result))

    return operation


@opcode("bfi")
def _bit_field_insert(instruction: Instruction) -> Operation:
    kind = last_type(instruction)
    a, b, c, d = readers(instruction, kind, kind, "u32", "u32")
    write, width = writer(instruction.operands[0], kind), bits_of(kind)
    raw = unsigned(width // 8)

    def operation(frame: Frame) -> None:
        start, length = c(frame) & np.uint32(255), d(frame) & np.uint32(255)
        full = length >= width
        ones = np.where(full, ~raw(0), (raw(1) << np.where(full, np.uint32(0), length).astype(raw)) - raw(1))
        beyond = start >= width
        inside = np.where(beyond, np.uint32(0), start).astype(raw)
        mask = np.where(beyond, raw(0), ones << inside)
        write(frame, ((a(frame) << inside) & mask) | (b(frame) & ~mask))

    return operation


@opcode("bfind")
def _find_leading(instruction: Instruction) -> Operation:
    """Position of the highest bit that differs from the sign (unsigned: of the highest one), -1 if there is none."""
    kind = last_type(instruction)
    width = bits_of(kind)
    amount = "shiftamt" in instruction.parts

    def find(a: Array) -> Array:
        raw = np.where(a < 0, ~a, a).view(unsigned(width // 8))
        position = highest_bit(raw)
        if amount:
            position = np.where(position < 0, position, width - 1 - position)
        return position.astype(np.int32).view(np.uint32)

    return unary(instruction, kind, find, "u32")


def highest_bit(a: Array) -> Array:
    """Position of the highest one bit (int64), -1 for 0."""
    high = (a.astype(np.uint64) >> np.uint64(32)).astype(np.float64)
    low = (a.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.float64)
    return np.where(high > 0, np.frexp(high)[1] + 31, np.frexp(low)[1] - 1).astype(np.int64)


@opcode("clz")
def _count_leading_zeros(instruction: Instruction) -> Operation:
    width = bits_of(last_type(instruction))
    return unary(instruction, last_type(instruction), lambda a: (width - 1 - highest_bit(a)).astype(np.uint32), "u32")


@opcode("popc")
def _population_count(instruction: Instruction) -> Operation:
    return unary(instruction, last_type(instruction), lambda a: np.bitwise_count(a).astype(np.uint32), "u32")


@opcode("brev")
def _bit_reverse(instruction: Instruction) -> Operation:
    kind = last_type(instruction)
    width = bits_of(kind)

    def reverse(a: Array) -> Array:
        step, ones = width // 2, (1 << width) - 1
        while step:
            mask = a.dtype.type(sum(((1 << step) - 1) << (2 * step * i) for i in range(width // (2 * step))) & ones)
            shift = a.dtype.type(step)
            a = ((a >> shift) & mask) | ((a & mask) << shift)
            step //= 2
        return a

    return unary(instruction, kind, reverse)


_PRMT_MODES: dict[str, list[list[int]]] = {
    "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
    "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
    "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
    "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
    "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
    "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
}


@opcode("prmt")
def _permute_bytes(instruction: Instruction) -> Operation:
    mode = instruction.parts[-1]
    a, b, c = readers(instruction, "u32", "u32", "u32")
    write = writer(instruction.operands[0], "u32")
    table = np.array(_PRMT_MODES[mode], np.uint64) if mode in _PRMT_MODES else None
    byte = np.uint64(0xFF)

    def operation(frame: Frame) -> None:
        joined = (b(frame).astype(np.uint64) << np.uint64(32)) | a(frame)
        selector = c(frame).astype(np.uint64)
        result: Array = np.zeros(1, np.uint64)
        for number in range(4):
            if table is not None:
                picked = table[(selector & np.uint64(3)).astype(np.int64), number]
                value = (joined >> (picked << np.uint64(3))) & byte
            else:
                nibble = selector >> np.uint64(4 * number)
                value = (joined >> ((nibble & np.uint64(7)) << np.uint64(3))) & byte
                replicate = (nibble & np.uint64(8)) != 0
                if replicate.any():
                    value = np.where(replicate, np.where(value & np.uint64(128), byte, np.uint64(0)), value)
            result = result | (value << np.uint64(8 * number))
        write(frame, result.astype(np.uint32))

    return operation


@opcode("dp4a", "dp2a")
def _dot_product(instruction: Instruction) -> Operation:
    types = [part for part in instruction.parts[1:] if part in ("u32", "s32")]
    a, b, c = readers(instruction, "u32", "u32", "u32")
    write = writer(instruction.operands[0], "u32")
    four, high = instruction.name == "dp4a", "hi" in instruction.parts

    def piece(value: Array, width: int, number: int, kind: str) -> Array:
        part = (value.astype(np.int64) >> (width * number)) & ((1 << width) - 1)
        return part - ((part >> (width - 1)) << width) if kind == "s32" else part

    def operation(frame: Frame) -> None:
        x, y = a(frame), b(frame)
        total = c(frame).astype(np.int64)
        for number in range(4 if four else 2):
            other = number if four else number + 2 * high
            total = total + piece(x, 8 if four else 16, number, types[0]) * piece(y, 8, other, types[1])
        write(frame, (total & 0xFFFFFFFF).astype(np.uint32))

    return operation


@opcode("bmsk")
def _bit_mask(instruction: Instruction) -> Operation:
    wrap = "wrap" in instruction.parts

    def mask(a: Array, b: Array) -> Array:
        start, length = (a & 31, b & 31) if wrap else (np.minimum(a, 32), np.minimum(b, 32))
        ones = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)
        return (ones << start.astype(np.uint64)).astype(np.uint32)

    return binary(instruction, "u32", mask)


@opcode("szext")
def _sign_or_zero_extend(instruction: Instruction) -> Operation:
    wrap, signed = "wrap" in instruction.parts, last_type(instruction) == "s32"

    def extend(a: Array, b: Array) -> Array:
        length = (b & 31 if wrap else np.minimum(b, 32)).astype(np.int64)
        low = a.astype(np.int64) & 0xFFFFFFFF & ((np.int64(1) << length) - 1)
        if signed:
            negative = (length > 0) & ((low >> np.maximum(length - 1, 0)) & 1 == 1)
            low = np.where(negative, low - (np.int64(1) << length), low)
        return (low & 0xFFFFFFFF).astype(np.uint32)

    return binary(instruction, "u32", extend)


__all__ = ["absolute", "add_sub", "binary", "divide", "minimum_maximum", "multiply", "multiply_add", "negate", "pair"]
