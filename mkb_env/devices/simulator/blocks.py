"""Basic blocks of a program and which registers are alive between them."""

from __future__ import annotations

from mkb_env.devices.simulator.instructions import (
    NO_RESULT,
    TERMINATORS,
    WARP_SYNC,
    Block,
    Instruction,
    Many,
    Memory,
    Not,
    Program,
    Register,
    Symbol,
    Value,
)
from mkb_env.devices.simulator.operands import Imm


def defines_and_uses(instruction: Instruction) -> tuple[list[int], list[int]]:
    """Registers written and read. A guarded instruction also reads what it writes."""
    name = instruction.name
    operands = list(instruction.operands)
    written: list[int] = []
    has_result = name not in NO_RESULT and not (name in ("bar", "barrier") and "red" not in instruction.parts)
    if has_result and operands and not isinstance(operands[0], Memory | Imm | Symbol):
        written = _registers(operands[0])
        if name != "wgmma":
            operands = operands[1:]
    read = [index for operand in operands for index in _registers(operand)]
    if instruction.guard is not None:
        read += [instruction.guard.index, *written]
    if "cc" in instruction.parts:
        written.append(0)
    if name in ("addc", "subc", "madc"):
        read.append(0)
    return written, read


def _registers(value: Value | None) -> list[int]:
    if isinstance(value, Register):
        return [value.index]
    if isinstance(value, Not):
        return [value.register.index]
    if isinstance(value, Many):
        return [index for item in value.items for index in _registers(item)]
    if isinstance(value, Memory):
        return [*_registers(value.base), *(index for item in value.extra for index in _registers(item))]
    return []


def make_blocks(program: Program) -> None:
    """Fill in ``program.blocks`` and ``program.block_of``."""
    instructions = program.instructions
    leaders = {0} | {label for label in program.labels if label < len(instructions)}
    for number, instruction in enumerate(instructions):
        if instruction.name in TERMINATORS:
            leaders.add(number + 1)
        if instruction.name in ("bar", "barrier") or instruction.name in WARP_SYNC:
            leaders.add(number)  # lanes that took different ways meet here
    starts = sorted(leader for leader in leaders if leader < len(instructions))
    program.block_of = {start: number for number, start in enumerate(starts)}
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(instructions)
        last = instructions[end - 1]
        following = [number + 1] if number + 1 < len(starts) else []
        if last.name in ("bra", "brx"):
            targets = [program.block_of[target] for target in last.targets if target < len(instructions)]
            unconditional = last.guard is None
            following = targets if unconditional else targets + following
        elif last.name in ("ret", "exit", "trap") and last.guard is None:
            following = []
        program.blocks.append(Block(start, end, tuple(dict.fromkeys(following))))
    _liveness(program)


def _liveness(program: Program) -> None:
    """Backward data flow over the blocks, register sets as bit masks (Aho et al., Compilers, 9.2.5)."""
    for block in program.blocks:
        uses = defines = 0
        for instruction in program.instructions[block.begin : block.end]:
            written, read = defines_and_uses(instruction)
            for index in read:
                uses |= (1 << index) & ~defines
            for index in written:
                defines |= 1 << index
        block.uses, block.defines = uses, defines
    predecessors: list[list[int]] = [[] for _ in program.blocks]
    for number, block in enumerate(program.blocks):
        for successor in block.successors:
            predecessors[successor].append(number)
    pending = list(range(len(program.blocks)))
    queued = set(pending)
    while pending:
        number = pending.pop()
        queued.discard(number)
        block = program.blocks[number]
        block.live_out = 0
        for successor in block.successors:
            block.live_out |= program.blocks[successor].live_in
        live_in = block.uses | (block.live_out & ~block.defines)
        if live_in != block.live_in:
            block.live_in = live_in
            for predecessor in predecessors[number]:
                if predecessor not in queued:
                    queued.add(predecessor)
                    pending.append(predecessor)
    for block in program.blocks:
        block.use_list = tuple(bits(block.uses))
        block.dead_list = tuple(bits((block.live_in | block.defines) & ~block.live_out))


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
