"""Runs a launch: chunks of the grid, one basic block at a time, with barriers and reconvergence.

Scheduling: of the frames that can run, those of the schedule's first group go first, and of these the one at the lowest
program counter, joined by all frames at the same place. Compilers lay code out so that this brings lanes that branched
differently back together before the code after the branch. A frame that spins for another one is set aside until memory
changes, or, where that cannot be told, interrupted: every FAIRNESS decisions the frame that waited longest gets a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator import barriers, progress
from mkb_env.devices.simulator.blocks import bits
from mkb_env.devices.simulator.chunk import Chunk, LaunchContext
from mkb_env.devices.simulator.decode import Operation, Unsupported, decode, reader
from mkb_env.devices.simulator.frame import Frame, merge
from mkb_env.devices.simulator.instructions import WARP_SYNC, Block, Instruction, Program
from mkb_env.devices.simulator.warps import to_mask, warps_of

Array = NDArray[Any]
CHUNK_LANES = 1 << 14
"""Lanes that run at a time: large enough to hide Python's cost, small enough for registers to stay in the cache."""
MAX_COOPERATIVE_LANES = 132 * 2048
FAIRNESS = 512
TURN = 64
"""Blocks that a frame may execute in a turn it got out of fairness."""
SPIN = 2048
"""Blocks after which the frame that goes first may be one that waits for another."""
ACROSS = 16
"""Every so many turns out of fairness, the frame that waited longest may be one of another group."""

Terminator = Callable[["Runner", Frame], "Frame | None"]


class Code:
    """A program's decoded blocks; decoded on first execution."""

    def __init__(self, program: Program) -> None:
        self.program, self.widths = program, program.widths
        self.operations: list[list[Operation] | None] = [None] * len(program.blocks)
        self.terminators: list[Terminator | None] = [None] * len(program.blocks)
        self.defines: list[tuple[int, ...]] = [()] * len(program.blocks)
        self.has_clock = progress.has_clock(program)
        self.member_masks: dict[int, Callable[[Frame], Array] | None] = {}

    def prepare(self, number: int) -> list[Operation]:
        """Decode block ``number``."""
        program, block = self.program, self.program.blocks[number]
        instructions = program.instructions[block.begin : block.end]
        last = instructions[-1]
        terminator = _terminator(program, block, last)
        if terminator is not None:
            instructions = instructions[:-1]
        first = program.instructions[block.begin]
        if first.name in WARP_SYNC and "sync" in first.parts:
            self.member_masks[number] = _member_mask(first)
        self.terminators[number] = terminator
        self.defines[number] = tuple(bits(block.defines))
        operations = [decode(instruction, program.name) for instruction in instructions]
        self.operations[number] = operations
        return operations


def _member_mask(instruction: Instruction) -> Callable[[Frame], Array] | None:
    """Reads the lanes that must arrive together; None means the whole warp."""
    if instruction.name in ("shfl", "vote", "match", "redux", "elect"):
        return reader(instruction.operands[-1], "u32")
    return None


def _terminator(program: Program, block: Block, last: Instruction) -> Terminator | None:
    """What happens at the end of a block; None is falling through."""
    if last.name == "bra":
        return _branch(program, last)
    if last.name == "brx":
        return _branch_table(program, last)
    if last.name in ("ret", "exit"):
        return _exit(last)
    if last.name in ("bar", "barrier"):
        return barriers.decode(last, program)
    return None


def _branch(program: Program, instruction: Instruction) -> Terminator:
    target = program.block_of[instruction.targets[0]]
    if instruction.guard is None:

        def jump(runner: Runner, frame: Frame) -> Frame:
            frame.pc = target
            return frame

        return jump
    index, negated = instruction.guard.index, instruction.negated

    def branch(runner: Runner, frame: Frame) -> Frame | None:
        taken = frame.registers[index]
        if negated:
            taken = ~taken
        count = int(np.count_nonzero(taken)) if len(taken) > 1 else int(taken[0]) * frame.n
        if count == 0:
            frame.pc += 1
            return frame
        if count == frame.n:
            frame.pc = target
            return frame
        runner.split(frame, np.flatnonzero(taken), target)
        runner.split(frame, np.flatnonzero(~taken), frame.pc + 1)
        return None

    return branch


def _branch_table(program: Program, instruction: Instruction) -> Terminator:
    targets = [program.block_of[target] for target in instruction.targets]
    read = reader(instruction.operands[0], "u32")

    def branch(runner: Runner, frame: Frame) -> Frame | None:
        choice = np.minimum(read(frame), np.uint32(len(targets) - 1))
        distinct = np.unique(choice)
        if len(distinct) == 1:
            frame.pc = targets[int(distinct[0])]
            return frame
        for value in distinct:
            runner.split(frame, np.flatnonzero(choice == value), targets[int(value)])
        return None

    if instruction.guard is not None or not targets:
        raise DeviceFault("unsupported", f"predicated or empty brx.idx at PTX line {instruction.line}", program.name)
    return branch


def _exit(instruction: Instruction) -> Terminator:
    if instruction.guard is None:

        def leave(runner: Runner, frame: Frame) -> None:
            runner.exit(frame)

        return leave
    index, negated = instruction.guard.index, instruction.negated

    def maybe(runner: Runner, frame: Frame) -> Frame | None:
        leaving = frame.full(frame.registers[index] ^ negated)
        count = int(np.count_nonzero(leaving))
        if count == frame.n:
            runner.exit(frame)
            return None
        if count:
            runner.exit(frame.part(np.flatnonzero(leaving)))
            runner.split(frame, np.flatnonzero(~leaving), frame.pc + 1)
            return None
        frame.pc += 1
        return frame

    return maybe


def run_launch(launch: LaunchContext, code: Code) -> None:
    """Run every block of the grid. Raises DeviceFault."""
    pitch = -(-launch.threads // 32) * 32
    groups = launch.schedule.groups(pitch // 32, launch.cooperative)
    per_chunk = max(1, groups * CHUNK_LANES // pitch)
    if launch.cooperative:
        if launch.ctas * pitch > MAX_COOPERATIVE_LANES:
            raise DeviceFault(
                "launch_error",
                f"a cooperative launch must fit on the device: {launch.ctas} blocks of {launch.threads} threads do not",
                launch.program.name,
            )
        per_chunk = launch.ctas
    for first in range(0, launch.ctas, per_chunk):
        Runner(Chunk(launch, first, min(per_chunk, launch.ctas - first), code.widths), code).run()


class Runner:
    """Runs the frames of one chunk."""

    def __init__(self, chunk: Chunk, code: Code) -> None:
        self.chunk, self.code, self.program = chunk, code, code.program
        self.ready: list[Frame] = list(chunk.roots)
        self.parked = 0
        """Frames that wait at a barrier."""
        self.clock = 0

    def split(self, frame: Frame, positions: Array, pc: int) -> None:
        """Make the lanes at ``positions`` a frame of their own that can run."""
        child = frame.child(positions, pc)
        child.stamp = self.clock
        self.ready.append(child)

    def exit(self, frame: Frame) -> None:
        """End a frame's lanes."""
        chunk = self.chunk
        chunk.alive -= np.bincount(chunk.cta_of(frame), minlength=chunk.ctas)
        chunk.alive_total -= frame.n
        chunk.exited[frame.lanes] = True
        for other in self.ready:
            other.wait, other.stalled = None, -1
        if chunk.barriers:
            barriers.recheck(self)

    def run(self) -> None:
        """Run until all lanes have ended. Raises DeviceFault."""
        with np.errstate(all="ignore"):
            decisions, over = 0, False
            while self.ready:
                decisions += 1
                frame = self._pick(over or decisions % FAIRNESS == 0, over or decisions % (ACROSS * FAIRNESS) == 0)
                others = [other for other in self.ready if self._able(other)]
                limit = min((other.pc for other in others if other.group == frame.group), default=1 << 62)
                turn = SPIN if others else 1 << 62
                if frame.pc > limit:
                    limit, turn = 1 << 62, TURN
                stopped = self._run_frame(frame, limit, turn)
                over = stopped and not over and turn > TURN  # it may wait for another: the next turn is the oldest's
        if self.chunk.alive_total:
            raise barriers.deadlock(self)

    def _able(self, frame: Frame) -> bool:
        """Whether a frame that is ready may go on."""
        return frame.wait is None and frame.stalled != self.chunk.writes

    def _pick(self, oldest: bool, across: bool) -> Frame:
        """Take the next frame out of ``ready``, merged with all others of its group at its program counter."""
        able = [frame for frame in self.ready if self._able(frame)]
        if not able:
            for frame in self.ready:
                if frame.wait is None:
                    raise progress.endless(frame)
            raise barriers.deadlock(self)
        if not across:
            first = min(frame.group for frame in able)
            able = [frame for frame in able if frame.group == first]
        chosen = min(able, key=lambda frame: frame.stamp if oldest else frame.pc)
        place = (chosen.group, chosen.pc)
        same = [frame for frame in self.ready if (frame.group, frame.pc) == place]
        self.ready = [frame for frame in self.ready if (frame.group, frame.pc) != place]
        if len(same) > 1:
            chosen = merge(same, self.program.blocks[chosen.pc].live_in)
        elif not self.ready and chosen.parent is not None and self.parked == 0:
            chosen.rebase(None, self.program.blocks[chosen.pc].live_in)  # the others have exited
        chosen.wait, chosen.stalled = None, -1
        return chosen

    def _run_frame(self, start: Frame, limit: int, turn: int) -> bool:
        """Execute blocks until the frame waits, splits, ends, or another frame should go first.

        Returns whether it was stopped because its turn was over.
        """
        code, launch, blocks = self.code, self.chunk.launch, self.program.blocks
        operations, terminators, defines = code.operations, code.terminators, code.defines
        counts = launch.block_warps
        meeting = {other.pc for other in self.ready if other.group == start.group and not self._able(other)}
        watch = None if code.has_clock else progress.Watch(self.program)
        frame: Frame | None = start
        executed = 0
        while frame is not None:
            pc = frame.pc
            if pc >= limit or pc in meeting or executed >= turn:
                frame.stamp = self.clock
                self.ready.append(frame)
                break
            if executed >= progress.FIRST and watch is not None and watch.repeats(frame, executed):
                frame.stamp, frame.stalled = self.clock, self.chunk.writes
                frame.cache["loop"] = watch.low, watch.high
                self.ready.append(frame)
                break
            body = operations[pc]
            if body is None:
                body = code.prepare(pc)
            if pc in code.member_masks and frame.n != self.chunk.alive_total and not self._together(frame, pc):
                break
            block, registers = blocks[pc], frame.registers
            for index in block.use_list:
                if registers[index] is None:
                    frame.read(index)
            try:
                for number, operation in enumerate(body):  # noqa: B007
                    operation(frame)
            except DeviceFault:
                raise
            except Exception as error:
                raise self._failure(block.begin + number, error) from error
            if frame.parent is not None:
                frame.written.update(defines[pc])
            counts[pc] += frame.warps
            executed += 1
            launch.executed_blocks += 1
            if executed & 127 == 0:
                progress.check_budget(self.chunk, frame)
            terminator = terminators[pc]
            following: Frame | None = frame
            if terminator is None:
                frame.pc = pc + 1
            else:
                following = terminator(self, frame)
            for index in block.dead_list:
                registers[index] = None
            frame = following
        self.clock += 1
        if self.clock & 63 == 0:
            progress.check_budget(self.chunk, start)
        return executed >= turn

    def _failure(self, number: int, error: Exception) -> DeviceFault:
        """What an exception of an operation means: a form that is not simulated, or a fault of the simulator."""
        instruction, name = self.program.instructions[number], self.program.name
        where = f"at PTX line {instruction.line} of {name}: {instruction.text}"
        if isinstance(error, Unsupported):
            return DeviceFault("unsupported", f"{instruction.opcode}: not simulated: {error}\n  {where}", name)
        return DeviceFault("infra_error", f"the simulator failed with {error!r}\n  {where}", name)

    def _together(self, frame: Frame, pc: int) -> bool:
        """Whether all lanes that a warp-level instruction names are here; those that must wait become a frame."""
        chunk, warps = self.chunk, warps_of(frame)
        if warps.whole:
            return True
        read = self.code.member_masks[pc]
        present = warps.masks()
        number = warps.numbers
        exited = to_mask(chunk.exited.reshape(-1, 32)[number])
        within = (chunk.pitch - 32 < (number * 32) % chunk.pitch) & chunk.padded
        existing = np.where(within, np.uint32((1 << (chunk.threads % 32 or 32)) - 1), np.uint32(0xFFFFFFFF))
        if read is None:
            members = np.full((warps.count, 32), 0xFFFFFFFF, np.uint32)
        else:
            for index in self.program.blocks[pc].use_list:
                if frame.registers[index] is None:
                    frame.read(index)
            members = warps.spread(frame.full(read(frame)))
        missing = members & (existing & ~exited & ~present)[:, None]
        waiting = warps.gather(missing) != 0
        if not waiting.any():
            return True
        if waiting.all():
            frame.wait = "warp"
            self.ready.append(frame)
            return False
        self.split(frame, np.flatnonzero(~waiting), pc)
        held = frame.child(np.flatnonzero(waiting), pc)
        held.wait = "warp"
        self.ready.append(held)
        return False
