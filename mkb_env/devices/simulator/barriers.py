"""Block-wide barriers (PTX ISA 9.7.13.1): ``bar``, ``barrier`` with ``sync``, ``arrive``, ``red`` and ``warp.sync``.

A barrier completes for a block when as many threads have arrived as it expects: a given count, or all threads of the
block that have not ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.decode import Reader, reader, writer
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction, Program, Value

if TYPE_CHECKING:
    from mkb_env.devices.simulator.machine import Runner

Array = NDArray[Any]
CLUSTER = 1 << 16
"""Number of the cluster's barrier; a block's own are 0 to 15."""


@dataclass
class Waiting:
    """Lanes parked at a barrier; ``finish`` writes a reduction's result when they go on."""

    frame: Frame
    instruction: Instruction
    finish: Callable[[Frame, Barrier], None] | None


@dataclass
class Barrier:
    """One barrier number, in all blocks of a chunk."""

    arrived: Array
    expected: Array
    """Thread count given by the instruction, 0 for all threads."""
    waiting: list[Waiting] = field(default_factory=list)
    votes: Array | None = None
    """Threads whose ``red`` predicate held, per block."""
    total: Array | None = None


def decode(instruction: Instruction, program: Program) -> Callable[[Runner, Frame], Frame | None]:
    """The terminator for a barrier instruction."""
    parts = instruction.parts
    if "cluster" in parts:  # of one block; to wait for all to wait is stricter than the ISA, and the same for most
        return _next if "arrive" in parts else _cluster_wait(instruction)
    if "warp" in parts:
        return _next  # the machine has gathered the warp where it matters: blocks begin at every barrier
    if instruction.guard is not None:
        raise DeviceFault("unsupported", f"a predicated barrier at PTX line {instruction.line}", program.name)
    operands = list(instruction.operands)
    target = operands.pop(0) if "red" in parts else None
    vote = reader(operands.pop(), "pred") if "red" in parts else None
    number = reader(operands[0], "u32")
    count = reader(operands[1], "u32") if len(operands) > 1 else None
    if "arrive" in parts:
        return lambda runner, frame: _arrive(runner, frame, number, count)
    finish = _finisher(parts, target) if vote is not None else None
    return lambda runner, frame: _sync(runner, frame, instruction, number, count, vote, finish)


def _next(runner: Runner, frame: Frame) -> Frame:
    frame.pc += 1
    return frame


def _cluster_wait(instruction: Instruction) -> Callable[[Runner, Frame], Frame | None]:
    number = np.array([CLUSTER], np.uint32)
    return lambda runner, frame: _sync(runner, frame, instruction, lambda _: number, None, None, None)


def _barrier(runner: Runner, number: int) -> Barrier:
    chunk = runner.chunk
    if number not in chunk.barriers:
        chunk.barriers[number] = Barrier(np.zeros(chunk.ctas, np.int64), np.zeros(chunk.ctas, np.int64))
    found: Barrier = chunk.barriers[number]
    return found


def _each(runner: Runner, frame: Frame, number: Reader) -> list[tuple[int, Frame]]:
    """The frame by barrier number."""
    numbers = number(frame)
    if len(numbers) == 1 or (numbers == numbers[0]).all():
        return [(int(numbers[0]), frame)]
    return [(int(value), frame.child(np.flatnonzero(numbers == value), frame.pc)) for value in np.unique(numbers)]


def _note(runner: Runner, frame: Frame, barrier: Barrier, count: Reader | None) -> None:
    chunk = runner.chunk
    chunk.writes += 1
    ctas = chunk.cta_of(frame)
    barrier.arrived += np.bincount(ctas, minlength=chunk.ctas)
    if count is not None:
        barrier.expected[ctas] = count(frame)


def _arrive(runner: Runner, frame: Frame, number: Reader, count: Reader | None) -> Frame:
    for value, part in _each(runner, frame, number):
        for register in runner.program.blocks[frame.pc].use_list:
            part.read(register)
        barrier = _barrier(runner, value)
        _note(runner, part, barrier, count)
        _complete(runner, barrier)
    frame.pc += 1
    return frame


def _sync(
    runner: Runner,
    frame: Frame,
    instruction: Instruction,
    number: Reader,
    count: Reader | None,
    vote: Reader | None,
    finish: Callable[[Frame, Barrier], None] | None,
) -> Frame | None:
    chunk = runner.chunk
    whole = frame.n == chunk.alive_total and count is None and vote is None
    if whole and not runner.parked and len(numbers := number(frame)) == 1 and int(numbers[0]) not in chunk.barriers:
        frame.pc += 1
        return frame
    for value, part in _each(runner, frame, number):
        for register in runner.program.blocks[frame.pc].use_list:
            part.read(register)
        barrier = _barrier(runner, value)
        if vote is not None:
            _collect(chunk.ctas, chunk.cta_of(part), barrier, part.full(vote(part)))
        _note(runner, part, barrier, count)
        part.pc = frame.pc
        barrier.waiting.append(Waiting(part, instruction, finish))
        runner.parked += 1
        _complete(runner, barrier)
    return None


def _collect(count: int, ctas: Array, barrier: Barrier, holds: Array) -> None:
    if barrier.votes is None or barrier.total is None:
        barrier.votes, barrier.total = np.zeros(count, np.int64), np.zeros(count, np.int64)
    barrier.votes += np.bincount(ctas[holds], minlength=count)
    barrier.total += np.bincount(ctas, minlength=count)


def _finisher(parts: tuple[str, ...], target: Value | None) -> Callable[[Frame, Barrier], None]:
    popc = "popc" in parts
    write = writer(target, "u32" if popc else "pred")

    def finish(frame: Frame, barrier: Barrier) -> None:
        assert barrier.votes is not None and barrier.total is not None
        ctas = frame.chunk.cta_of(frame)
        votes, total = barrier.votes[ctas], barrier.total[ctas]
        if popc:
            write(frame, votes.astype(np.uint32))
        else:
            write(frame, votes == total if "and" in parts else votes > 0)

    return finish


def _complete(runner: Runner, barrier: Barrier) -> None:
    """Let go on the lanes of every block whose barrier is complete."""
    chunk = runner.chunk
    expected = np.where(barrier.expected > 0, barrier.expected, chunk.alive)
    done = (barrier.arrived >= expected) & (barrier.arrived > 0)
    if not done.any():
        return
    remaining = []
    for waiting in barrier.waiting:
        frame = waiting.frame
        free = done[chunk.cta_of(frame)]
        if not free.any():
            remaining.append(waiting)
            continue
        if not free.all():
            held = frame.child(np.flatnonzero(~free), frame.pc)
            remaining.append(Waiting(held, waiting.instruction, waiting.finish))
            frame = frame.child(np.flatnonzero(free), frame.pc)
            runner.parked += 1
        if waiting.finish is not None:
            waiting.finish(frame, barrier)
            frame.written.update(runner.code.defines[frame.pc])
        frame.pc += 1
        frame.stamp = runner.clock
        runner.ready.append(frame)
        runner.parked -= 1
    barrier.waiting = remaining
    barrier.arrived[done] = 0
    barrier.expected[done] = 0
    if barrier.votes is not None and barrier.total is not None:
        barrier.votes[done] = 0
        barrier.total[done] = 0
    if not barrier.waiting and not barrier.arrived.any():
        number = next(key for key, value in chunk.barriers.items() if value is barrier)
        del chunk.barriers[number]


def recheck(runner: Runner) -> None:
    """Lanes have ended: barriers that waited for all threads may be complete now."""
    for barrier in list(runner.chunk.barriers.values()):
        if barrier.waiting:
            _complete(runner, barrier)


def deadlock(runner: Runner) -> DeviceFault:
    """The report when no lane can go on."""
    chunk, name = runner.chunk, runner.program.name
    for number, barrier in sorted(chunk.barriers.items()):
        if not barrier.waiting:
            continue
        waiting = barrier.waiting[0]
        cta = int(chunk.cta_of(waiting.frame)[0])
        block = chunk.coordinates(cta * chunk.pitch)[0]
        wanted = int(barrier.expected[cta]) or int(chunk.alive[cta])
        return DeviceFault(
            "timeout",
            f"barrier {number} is never complete: {int(barrier.arrived[cta])} of {wanted} threads arrived "
            f"in block {block}\n"
            f"  at PTX line {waiting.instruction.line} of {name}: {waiting.instruction.text}\n"
            "  the other threads wait elsewhere; every thread of the block must reach the same barrier",
            name,
        )
    frame = runner.ready[0]
    instruction = runner.program.instructions[runner.program.blocks[frame.pc].begin]
    return DeviceFault(
        "timeout",
        f"{instruction.opcode} waits for lanes of its warp that never arrive\n"
        f"  at PTX line {instruction.line} of {name}: {instruction.text}\n"
        f"  by {chunk.describe(int(frame.lanes[0]))}; its member mask names lanes that take another path",
        name,
    )
