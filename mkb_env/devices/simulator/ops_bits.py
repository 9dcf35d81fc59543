"""Logic, shift and bit-field instructions (PTX ISA 9.7.8, and 9.7.1 from ``popc`` on)."""

from __future__ import annotations

import dataclasses

import numpy as np

from mkb_env.devices.simulator.decode import (
    Array,
    Operation,
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
from mkb_env.devices.simulator.instructions import Instruction
from mkb_env.devices.simulator.operands import Imm
from mkb_env.devices.simulator.ops_integer import Binary, binary, bits_of, readers, unary

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
    """Any function of three bits, as a sum of its minterms. The fifth operand is the truth table."""
    destination, predicate = pair(instruction.operands[0])
    table = instruction.operands[4]
    if not isinstance(table, Imm):
        raise Unsupported("lop3 with a truth table in a register")
    minterms = [minterm for minterm in range(8) if table.value >> minterm & 1]
    a, b, c = readers(instruction, "b32", "b32", "b32")
    write, write_predicate = writer(destination, "b32"), writer(predicate, "pred")
    extra = reader(instruction.operands[5], "pred") if len(instruction.operands) > 5 else None
    both = "and" in instruction.parts

    def operation(frame: Frame) -> None:
        x, y, z = a(frame), b(frame), c(frame)
        result: Array = np.zeros(1, np.uint32)
        for minterm in minterms:
            term = (x if minterm & 4 else ~x) & (y if minterm & 2 else ~y) & (z if minterm & 1 else ~z)
            result = result | term
        write(frame, result)
        if extra is not None:
            some, other = result != 0, extra(frame)
            write_predicate(frame, some & other if both else some | other)

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
        one = dataclasses.replace(instruction, operands=instruction.operands[:2])
        return unary(one, kind, lambda a: shift(a, amount))

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
