"""Loops that never end: what bounds them, and what proves them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.blocks import bits
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Program, Special

if TYPE_CHECKING:
    from mkb_env.devices.simulator.chunk import Chunk

Array = NDArray[Any]
FIRST = 32
"""Blocks that a frame executes in a turn before it is watched."""
LONGEST = 64
"""Blocks of the longest loop that is recognised."""


def has_clock(program: Program) -> bool:
    """Whether the program reads a clock, so that it may go on though neither registers nor memory change."""
    return any(
        isinstance(operand, Special) and operand.name.startswith(("clock", "globaltimer"))
        for instruction in program.instructions
        for operand in instruction.operands
    )


class Watch:
    """Finds out that a frame is in a state that it was in before: same place, same live registers, no write between.

    Such a frame goes on only if another one changes memory; if none can, it runs for ever. One comparison in every
    LONGEST blocks.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.frame: Frame | None = None
        self.pc = self.writes = self.until = self.low = self.high = 0
        self.values: list[tuple[int, Array | None]] = []

    def repeats(self, frame: Frame, executed: int) -> bool:
        """Whether ``frame``, which executed so many blocks in this turn, is back in a former state."""
        if frame is not self.frame or executed >= self.until:
            self.frame, self.pc, self.writes, self.until = frame, frame.pc, frame.chunk.writes, executed + LONGEST
            self.low = self.high = frame.pc
            self.values = [(index, frame.registers[index]) for index in bits(self.program.blocks[frame.pc].live_in)]
            return False
        self.low, self.high = min(self.low, frame.pc), max(self.high, frame.pc)
        if frame.pc != self.pc:
            return False
        if self.writes == frame.chunk.writes and all(_same(frame, index, value) for index, value in self.values):
            return True
        self.until = 0
        return False


def _same(frame: Frame, index: int, before: Array | None) -> bool:
    """Whether a register holds what it did; None stood for the parent's value."""
    value = frame.registers[index]
    if value is before:
        return True
    if before is None:
        return index not in frame.written if frame.parent is not None else False
    return value is not None and bool(np.array_equal(value, before))


def endless(frame: Frame) -> DeviceFault:
    """The report on a frame that repeats blocks while no other frame can run."""
    program, chunk = frame.chunk.program, frame.chunk
    low, high = frame.cache["loop"]
    first = program.instructions[program.blocks[low].begin].line
    last = program.instructions[program.blocks[high].end - 1].line
    return DeviceFault(
        "timeout",
        f"kernel {program.name} never ends: {frame.n} threads, among them {chunk.describe(int(frame.lanes[0]))}, "
        f"repeat PTX lines {first} to {last}; neither their registers nor memory change there, and no other thread can "
        "run and change it. Look for a loop whose condition never becomes false, or a wait for something that never "
        "happens (another block may start only when this one has ended, except in a cooperative launch).",
        program.name,
    )


def check_budget(chunk: Chunk, frame: Frame) -> None:
    """Raise DeviceFault if the launch has used up its time or its blocks."""
    launch, program = chunk.launch, chunk.program
    late = time.thread_time() > launch.deadline
    if not late and launch.executed_blocks <= launch.block_budget:
        return
    counts, blocks, instructions = launch.block_warps, program.blocks, program.instructions
    most = max(counts, default=0)
    hot = [block for block, count in zip(blocks, counts, strict=True) if 2 * count >= most]
    lines = [instructions[block.begin].line for block in hot] + [instructions[block.end - 1].line for block in hot]
    reason = "the time limit of the simulator" if late else f"the limit of {launch.block_budget} executed blocks"
    raise DeviceFault(
        "timeout",
        f"kernel {program.name} did not end within {reason}: {frame.n} threads, among them "
        f"{chunk.describe(int(frame.lanes[0]))}, still run; "
        f"most time went to PTX lines {min(lines)} to {max(lines)}. "
        "Look for a loop whose condition never becomes false, or a wait for something that never happens.",
        program.name,
    )
