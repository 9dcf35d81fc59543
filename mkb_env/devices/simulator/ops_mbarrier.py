"""Memory barriers in shared memory (PTX ISA 9.7.13.15) of the executing block, and the copies that signal them.

An mbarrier is one 64-bit word, in a layout of our own (the hardware's is opaque): bits 0-19 pending arrivals, 20-39
arrivals expected in the next phase, 40-61 pending transaction bytes plus TX_ZERO, bit 63 the parity of the current
phase. Lanes that meet at one barrier are served in lane order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mkb_env.devices.simulator.decode import (
    Array,
    Operation,
    Reader,
    Unsupported,
    address,
    opcode,
    reader,
    writer,
)
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction, Memory
from mkb_env.devices.simulator.memory import Access
from mkb_env.devices.simulator.ops_atomic import apply
from mkb_env.devices.simulator.ops_memory import load, state_space

COUNT_MASK = np.uint64((1 << 20) - 1)
EXPECTED = np.uint64(20)
TX = np.uint64(40)
TX_MASK = np.uint64((1 << 22) - 1)
TX_ZERO = np.uint64(1 << 20)
PARITY = np.uint64(63)
ONE = np.uint64(1)


def initial(count: Array) -> Array:
    """The word of a fresh barrier that expects ``count`` arrivals (uint64)."""
    return (count & COUNT_MASK) | ((count & COUNT_MASK) << EXPECTED) | (TX_ZERO << TX)


def advance(word: Array, arrivals: Array, bytes_expected: Array, dropped: Array) -> Array:
    """The word after ``arrivals`` arrivals, ``bytes_expected`` more transaction bytes (a wrapped uint64, negative where
    bytes arrive) and ``dropped`` fewer arrivals in later phases. Completes the phase when nothing is pending.
    """
    pending = ((word & COUNT_MASK) - arrivals) & COUNT_MASK
    expected = (((word >> EXPECTED) & COUNT_MASK) - dropped) & COUNT_MASK
    bytes_pending = (((word >> TX) & TX_MASK) + bytes_expected) & TX_MASK
    parity = word >> PARITY
    done = (pending == 0) & (bytes_pending == TX_ZERO)
    pending = np.where(done, expected, pending)
    parity = np.where(done, parity ^ ONE, parity)
    return pending | (expected << EXPECTED) | (bytes_pending << TX) | (parity << PARITY)


def _update(old: Array, args: list[Array]) -> Array:
    return advance(old, args[0], args[1], args[2])


def update(
    frame: Frame, access: Access, space: str, where: Array, arrivals: Array, expect: Array, drop: Array
) -> Array:
    """Apply :func:`advance` in memory; returns each lane's word from before."""
    args = [frame.full(value) for value in (arrivals, expect, drop)]
    return apply(frame, access, space, frame.full(where), args, _update)


def _zero(frame: Frame) -> Array:
    return np.zeros(1, np.uint64)


def _one(frame: Frame) -> Array:
    return np.ones(1, np.uint64)


@opcode("mbarrier")
def _mbarrier(instruction: Instruction) -> Operation:
    action = instruction.parts[1]
    if any("cluster" in part for part in instruction.parts if part.startswith("shared")):
        raise Unsupported("an mbarrier of another block of the cluster")
    decoders: dict[str, Callable[[Instruction], Operation]] = {
        "init": _init,
        "inval": lambda _: lambda frame: None,
        "arrive": _arrive,
        "arrive_drop": _arrive,
        "expect_tx": _transaction,
        "complete_tx": _transaction,
        "test_wait": _wait,
        "try_wait": _wait,
    }
    if action not in decoders:
        raise Unsupported(f"mbarrier.{action}")
    return decoders[action](instruction)


def _init(instruction: Instruction) -> Operation:
    where, count = address(instruction.operands[0])[0], reader(instruction.operands[1], "u64")
    access, space = Access("write", 8, 1, instruction), state_space(instruction)

    def operation(frame: Frame) -> None:
        word = frame.full(initial(count(frame)))
        apply(frame, access, space, frame.full(where(frame)), [word], lambda old, args: args[0])

    return operation


def _arrive(instruction: Instruction) -> Operation:
    """``arrive`` and ``arrive_drop``, with ``.expect_tx`` before them where asked for."""
    operands = list(instruction.operands)
    target = None if isinstance(operands[0], Memory) else operands.pop(0)
    where, write = address(operands[0])[0], writer(target, "b64")
    amount = reader(operands[1], "u64") if len(operands) > 1 else None
    expects, drops = "expect_tx" in instruction.parts, instruction.parts[1] == "arrive_drop"
    arrivals: Reader = amount if amount is not None and not expects else _one
    expected: Reader = amount if amount is not None and expects else _zero
    access, space = Access("atomic", 8, 1, instruction), state_space(instruction)

    def operation(frame: Frame) -> None:
        count = arrivals(frame)
        dropped = count if drops else _zero(frame)
        write(frame, update(frame, access, space, where(frame), count, expected(frame), dropped))

    return operation


def _transaction(instruction: Instruction) -> Operation:
    where, amount = address(instruction.operands[0])[0], reader(instruction.operands[1], "u64")
    completes = instruction.parts[1] == "complete_tx"
    access, space = Access("atomic", 8, 1, instruction), state_space(instruction)

    def operation(frame: Frame) -> None:
        count = amount(frame)
        update(
            frame, access, space, where(frame), _zero(frame), np.negative(count) if completes else count, _zero(frame)
        )

    return operation


def _wait(instruction: Instruction) -> Operation:
    """True once the phase given by a state, or by its parity, is complete. Never suspends: the program loops."""
    where, write = address(instruction.operands[1])[0], writer(instruction.operands[0], "pred")
    by_parity = "parity" in instruction.parts
    phase = reader(instruction.operands[2], "u64")
    access, space = Access("read", 8, 1, instruction), state_space(instruction)

    def operation(frame: Frame) -> None:
        word = load(frame, access, space, where(frame))[0]
        wanted = phase(frame) & ONE if by_parity else phase(frame) >> PARITY
        write(frame, (word >> PARITY) != wanted)

    return operation
