"""Turns an instruction into a Python function over whole arrays of lanes.

Each ``ops_*`` module registers decoders by opcode name. A decoder looks at the modifiers and operands once and returns
the function that is called each time the instruction executes, ``operation(frame)``; unknown opcodes become functions
that raise, so that only code that is reached must be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.blocks import defines_and_uses
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction, Many, Memory, Not, Register, Special, Symbol, Value
from mkb_env.devices.simulator.memory import UINT
from mkb_env.devices.simulator.operands import Imm
from mkb_env.devices.simulator.parser import TYPE_BYTES

Array = NDArray[Any]
Operation = Callable[[Frame], None]
Reader = Callable[[Frame], Array]
Writer = Callable[[Frame, Array], None]
NUMPY_TYPE: dict[str, Any] = {
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
"""PTX types that are not raw bits; all others are read as unsigned integers of their width."""


class Unsupported(Exception):
    """A decoder met a form that the simulator lacks; the message says what."""


Decoder = Callable[[Instruction], Operation]
REGISTRY: dict[str, Decoder] = {}


def opcode(*names: str) -> Callable[[Decoder], Decoder]:
    """Register a decoder for opcodes of these names (the part before the first dot)."""

    def register(decoder: Decoder) -> Decoder:
        for name in names:
            REGISTRY[name] = decoder
        return decoder

    return register


def decode(instruction: Instruction, kernel: str) -> Operation:
    """The function that executes ``instruction``. Never fails: what is unknown raises when executed."""
    decoder = REGISTRY.get(instruction.name)
    try:
        if decoder is None:
            raise Unsupported("this opcode")
        operation = decoder(instruction)
    except (Unsupported, KeyError, IndexError, ValueError, AttributeError, TypeError, AssertionError) as error:
        reason = f"not simulated: {error if isinstance(error, Unsupported) else repr(error)}"
        return _raising(instruction, kernel, reason)
    if instruction.guard is not None:
        operation = _guarded(operation, instruction)
    return operation


def _raising(instruction: Instruction, kernel: str, reason: str) -> Operation:
    def operation(frame: Frame) -> None:
        raise DeviceFault(
            "unsupported",
            f"{instruction.opcode}: {reason}\n  at PTX line {instruction.line} of {kernel}: {instruction.text}",
            kernel,
        )

    return operation


def _guarded(operation: Operation, instruction: Instruction) -> Operation:
    """Execute for the lanes whose guard holds; the others keep their registers."""
    guard, negated = instruction.guard, instruction.negated
    assert guard is not None
    index = guard.index
    written, read = defines_and_uses(instruction)

    def guarded(frame: Frame) -> None:
        holds = frame.registers[index]
        if negated:
            holds = ~holds
        if holds.all():
            operation(frame)
            return
        if not holds.any():
            for register in written:
                frame.read(register)
            return
        positions = np.flatnonzero(holds)
        part = frame.part(positions)
        for register in read:
            part.read(register)
        before = [frame.read(register) for register in written]
        operation(part)
        for register, old in zip(written, before, strict=True):
            value = np.array(np.broadcast_to(old, (frame.n, *old.shape[1:])))
            value[positions] = part.registers[register]
            frame.registers[register] = value

    return guarded


def unsigned(nbytes: int) -> Any:
    """NumPy type of raw bits of that width."""
    return UINT[nbytes]


def numpy_type(kind: str) -> Any:
    """NumPy type in which a PTX type's values are computed; raw bits where NumPy has none (128 bits: two words)."""
    if kind == "pred":
        return np.bool_
    return NUMPY_TYPE.get(kind) or UINT[min(TYPE_BYTES[kind], 8)]


def constant(value: int, kind: str) -> Array:
    """A one-element array of raw bits, seen as ``kind``."""
    nbytes = TYPE_BYTES[kind]
    if nbytes == 16:
        return np.array([[value & (2**64 - 1), value >> 64 & (2**64 - 1)]], np.uint64)
    if kind == "pred":
        return np.array([bool(value)])
    return np.array([value & ((1 << (8 * nbytes)) - 1)], UINT[nbytes]).view(numpy_type(kind))


def immediate(literal: Imm, kind: str) -> Array:
    """A literal as ``kind``; float literals of another width are converted."""
    if literal.kind == "int" or (kind.startswith(("b", "u", "s")) and kind != "bf16"):
        return constant(literal.value, kind)
    bits: Array = np.array([literal.value], np.uint32 if literal.kind == "f32" else np.uint64)
    value = bits.view(np.float32 if literal.kind == "f32" else np.float64)
    if kind in ("f16", "f32", "f64"):
        return value.astype(NUMPY_TYPE[kind])
    return constant(literal.value, kind)


def reader(value: Value | None, kind: str) -> Reader:
    """A function that gives an operand as ``kind``. Wider registers are truncated, narrower ones zero-extended."""
    if isinstance(value, Register):
        return _register_reader(value, kind)
    if isinstance(value, Not):
        index = value.register.index
        return lambda frame: ~frame.registers[index]
    if isinstance(value, Imm):
        literal = immediate(value, kind)
        return lambda frame: literal
    if isinstance(value, Symbol):
        if value.space == "function":
            raise Unsupported(f"the address of function {value.name}")
        address = constant(value.value, kind)
        return lambda frame: address
    if isinstance(value, Special):
        name, bits = value.name, UINT[TYPE_BYTES[kind]]
        target = numpy_type(kind)
        return lambda frame: frame.special(name).astype(bits).view(target)
    raise Unsupported("expected a register or a literal")


def _register_reader(register: Register, kind: str) -> Reader:
    index, nbytes, target = register.index, TYPE_BYTES[kind], numpy_type(kind)
    if register.predicate:
        if kind == "pred":
            return lambda frame: frame.registers[index]
        bits = UINT[nbytes]
        return lambda frame: frame.registers[index].astype(bits).view(target)
    if register.nbytes == nbytes:
        if nbytes == 16 or target is UINT[nbytes]:
            return lambda frame: frame.registers[index]
        return lambda frame: frame.registers[index].view(target)
    if register.nbytes == 16 or nbytes == 16:
        raise Unsupported("a 128-bit register is used with another width")
    bits = UINT[nbytes]
    return lambda frame: frame.registers[index].astype(bits).view(target)


def writer(value: Value | None, kind: str) -> Writer:
    """A function that puts values of ``kind`` into a destination; wider registers are sign- or zero-extended."""
    if value is None:
        return lambda frame, result: None
    if not isinstance(value, Register):
        raise Unsupported("expected a register as destination")
    index = value.index
    if value.predicate or TYPE_BYTES[kind] == 16:

        def whole(frame: Frame, result: Array) -> None:
            frame.registers[index] = result

        return whole
    bits = UINT[value.nbytes]
    if value.nbytes == TYPE_BYTES[kind]:

        def same(frame: Frame, result: Array) -> None:
            frame.registers[index] = result.view(bits)

        return same
    target = NUMPY_TYPE[f"s{value.nbytes * 8}"] if kind.startswith("s") else bits

    own = numpy_type(kind)

    def extended(frame: Frame, result: Array) -> None:
        frame.registers[index] = result.view(own).astype(target).view(bits)

    return extended


def vector(value: Value | None) -> tuple[Value | None, ...]:
    """The elements of a vector operand; a single operand counts as one."""
    return value.items if isinstance(value, Many) and not value.pair else (value,)


def pair(value: Value | None) -> tuple[Value | None, Value | None]:
    """The two destinations of ``a|b``; the second is None where it is missing."""
    if isinstance(value, Many) and value.pair:
        return value.items[0], value.items[1]
    return value, None


def last_type(instruction: Instruction, position: int = -1) -> str:
    """The type modifier at ``position`` among the opcode's type modifiers."""
    types = [part for part in instruction.parts[1:] if part in TYPE_BYTES]
    if not types:
        raise Unsupported("the opcode has no type")
    return types[position]


def address(value: Value | None) -> tuple[Reader, str]:
    """A function that gives ``[base + offset]`` as uint64, and the state space that the base itself names, or ""."""
    if not isinstance(value, Memory):
        raise Unsupported("expected an address")
    if isinstance(value.base, Register):
        base = reader(value.base, "u64")
        if value.offset == 0:
            return base, ""
        offset = constant(value.offset, "u64")
        if value.base.nbytes == 4:
            return lambda frame: (base(frame) + offset) & np.uint64(0xFFFFFFFF), ""
        return lambda frame: base(frame) + offset, ""
    start = value.base.value if isinstance(value.base, Symbol) else 0
    space = value.base.space if isinstance(value.base, Symbol) else ""
    fixed = constant(start + value.offset, "u64")
    return lambda frame: fixed, space
