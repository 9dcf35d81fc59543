"""Lanes that run together, and their registers.

A chunk of the grid starts as one frame. Where lanes branch differently the frame splits: each child holds its own
lanes, reads registers of its parent on demand, and keeps what it writes. Children that meet again at one program
counter merge; once all lanes of the parent are back together the parent itself goes on, with the children's writes
put in. So code is always executed for whole arrays without masks, and a short divergent stretch costs only the
registers that it touches.

A register is an array of raw bits (uint8 to uint64, bool for predicates), of one element where all lanes agree and the
simulator knows it, else of one element per lane. 128-bit registers are arrays of shape (lanes, 2). Register arrays are
never changed in place, so that frames may share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.simulator.blocks import bits

if TYPE_CHECKING:
    from mkb_env.devices.simulator.chunk import Chunk

Array = NDArray[Any]
MAX_DEPTH = 4
"""Frames deeper than this read from their grandparent instead, so that chains stay short."""


class Frame:
    """Lanes at one program counter.

    ``lanes`` holds their slots in the chunk, ascending (slot = block in chunk x padded threads + thread).
    ``index`` holds their positions in the parent. ``registers[i]`` is None where the parent's value is meant.
    ``group`` is the schedule's: only frames of one group meet. ``stalled`` counts the chunk's writes when the frame was
    found to wait for another one.
    """

    __slots__ = (
        "cache", "chunk", "depth", "group", "index", "lanes", "n", "parent", "pc", "registers", "stalled", "stamp",
        "wait", "warps", "written",
    )  # fmt: skip

    def __init__(
        self,
        chunk: Chunk,
        lanes: Array,
        registers: list[Any],
        parent: Frame | None,
        index: Array | None,
        pc: int,
        group: int,
    ) -> None:
        self.chunk, self.lanes, self.registers, self.parent, self.index = chunk, lanes, registers, parent, index
        self.n, self.pc = len(lanes), pc
        self.written: set[int] = set()
        self.cache: dict[str, Any] = {}
        self.depth: int = parent.depth + 1 if parent else 0
        self.stamp = 0
        self.wait: Any = None
        self.group, self.stalled = group, -1
        self.warps = count_warps(lanes)

    def read(self, register: int) -> Array:
        """The value of a register, fetched from the ancestors where it is not here. Never-written registers are 0."""
        value = self.registers[register]
        if value is None:
            if self.parent is None:
                value = self.chunk.zero(register)
            else:
                value = self.parent.read(register)
                if len(value) != 1:
                    value = value[self.index]
            self.registers[register] = value
        return value

    def child(self, positions: Array, pc: int) -> Frame:
        """A new frame of the lanes at ``positions`` of this one."""
        parent, index, carried = self, positions, None
        if self.depth >= MAX_DEPTH and self.parent is not None:
            assert self.index is not None
            parent, index, carried = self.parent, self.index[positions], self.written
        frame = Frame(self.chunk, self.lanes[positions], [None] * len(self.registers), parent, index, pc, self.group)
        if carried:
            for register in carried:
                value = self.registers[register]
                if value is not None:
                    frame.registers[register] = value if len(value) == 1 else value[positions]
            frame.written = set(carried)
        return frame

    def part(self, positions: Array) -> Frame:
        """A temporary frame of the lanes at ``positions``, for one instruction."""
        return Frame(
            self.chunk, self.lanes[positions], [None] * len(self.registers), self, positions, self.pc, self.group
        )

    def special(self, name: str) -> Array:
        """A special register: one element where all lanes agree, else one per lane."""
        value = self.cache.get(name)
        if value is None:
            value = self.chunk.special(self, name)
            if not name.startswith(("clock", "globaltimer")):
                self.cache[name] = value
        return value

    def full(self, value: Array) -> Array:
        """``value`` with one element per lane."""
        return value if len(value) == self.n else value.repeat(self.n, axis=0)

    def rebase(self, ancestor: Frame | None, live: int) -> None:
        """Make ``ancestor`` (None: nobody) the parent, fetching what differs between the old parent and it."""
        while self.parent is not ancestor:
            parent = self.parent
            assert parent is not None and self.index is not None
            grand = parent.parent
            wanted = parent.written if grand is not None else bits(live)
            for register in wanted:
                if live >> register & 1:
                    self.read(register)
            self.written |= wanted if isinstance(wanted, set) else set(wanted)
            self.index = parent.index[self.index] if grand is not None and parent.index is not None else None
            self.parent = grand
        self.depth = ancestor.depth + 1 if ancestor else 0


def count_warps(lanes: Array) -> int:
    """How many different warps (groups of 32 slots) ascending slots fall into."""
    if len(lanes) == 0:
        return 0
    warps = lanes >> 5
    return int(np.count_nonzero(warps[1:] != warps[:-1])) + 1


def merge(frames: list[Frame], live: int) -> Frame:
    """One frame of all lanes of ``frames``, which are at one program counter where the registers ``live`` matter."""
    ancestor = _common_ancestor(frames)
    for frame in frames:
        frame.rebase(ancestor, live)
    if ancestor is None:
        written = set(bits(live))
    else:
        written = {register for frame in frames for register in frame.written if live >> register & 1}
    total = sum(frame.n for frame in frames)
    pc = frames[0].pc
    if ancestor is not None and total == ancestor.n:
        _scatter(ancestor, frames, written)
        ancestor.pc = pc
        return ancestor
    lanes = np.concatenate([frame.lanes for frame in frames])
    order = np.argsort(lanes, kind="stable")
    index = None
    if ancestor is not None:
        index = np.concatenate([frame.index for frame in frames])[order]
    first = frames[0]
    merged = Frame(first.chunk, lanes[order], [None] * len(first.registers), ancestor, index, pc, first.group)
    for register in written:
        merged.registers[register] = _join([frame.read(register) for frame in frames], frames, order)
    merged.written = written
    return merged


def _common_ancestor(frames: list[Frame]) -> Frame | None:
    """The nearest frame that all ``frames`` descend from (strictly)."""
    chain = []
    frame = frames[0].parent
    while frame is not None:
        chain.append(frame)
        frame = frame.parent
    for other in frames[1:]:
        ancestors = set()
        frame = other.parent
        while frame is not None:
            ancestors.add(id(frame))
            frame = frame.parent
        chain = [frame for frame in chain if id(frame) in ancestors]
    return chain[0] if chain else None


def _join(values: list[Array], frames: list[Frame], order: Array) -> Array:
    if all(len(value) == 1 for value in values):
        first = values[0]
        if all(np.array_equal(value, first) for value in values[1:]):
            return first
    spread = [
        value if len(value) == frame.n else np.broadcast_to(value, (frame.n, *value.shape[1:]))
        for value, frame in zip(values, frames, strict=True)
    ]
    joined: Array = np.concatenate(spread)[order]
    return joined


def _scatter(ancestor: Frame, frames: list[Frame], written: set[int]) -> None:
    """Put the children's writes into their parent, whose lanes are all here."""
    for register in written:
        writers = [frame for frame in frames if register in frame.written]
        if len(writers) == len(frames):
            values = [frame.read(register) for frame in frames]
            if all(len(value) == 1 for value in values) and all(np.array_equal(v, values[0]) for v in values[1:]):
                ancestor.registers[register] = values[0]
                continue
            shape = (ancestor.n, *values[0].shape[1:])
            result = np.empty(shape, values[0].dtype)
        else:
            old = ancestor.read(register)
            result = np.array(np.broadcast_to(old, (ancestor.n, *old.shape[1:])))
        for frame in writers:
            result[frame.index] = frame.read(register)
        ancestor.registers[register] = result
        ancestor.written.add(register)
    for register in written:
        ancestor.written.add(register)
