"""Warp-level matrix instructions (PTX ISA 9.7.14): registers of a frame go through :mod:`matrix` by warp.

The machine has gathered whole warps before one of these executes.
"""

from __future__ import annotations

import re

import numpy as np

from mkb_env.devices.simulator import matrix
from mkb_env.devices.simulator.decode import Array, Operation, Unsupported, address, opcode, reader, vector, writer
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction
from mkb_env.devices.simulator.memory import Access
from mkb_env.devices.simulator.ops_memory import load, state_space, store
from mkb_env.devices.simulator.warps import warps_of

_TYPES = frozenset({"f16", "bf16", "tf32", "f32", "f64", "s8", "u8", "s32", "e4m3", "e5m2"})


@opcode("mma")
def _mma(instruction: Instruction) -> Operation:
    """``mma.sync.aligned.shape.row.col.d.a.b.c``."""
    parts = instruction.parts
    if "sp" in parts or "sp::ordered_metadata" in parts or "block_scale" in parts or "row" not in parts:
        raise Unsupported("sparse, scaled or differently laid out matrices")
    found = next((m for part in parts if (m := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", part))), None)
    types = [part for part in parts if part in _TYPES]
    if found is None or len(types) != 4:
        raise Unsupported("expected a shape and four types")
    shape = (int(found[1]), int(found[2]), int(found[3]))
    d_type, a_type, b_type, c_type = types
    if not matrix.supports(shape, a_type, b_type, c_type, d_type):
        raise Unsupported("this shape and these types")
    bits = "b64" if d_type == "f64" else "b32"
    writes = [writer(item, bits) for item in vector(instruction.operands[0])]
    operands = [[reader(item, bits) for item in vector(operand)] for operand in instruction.operands[1:4]]
    satfinite = "satfinite" in parts
    rounding = next((part for part in parts if part in ("rn", "rz", "rm", "rp")), "rn")
    flops = 2 * shape[0] * shape[1] * shape[2]

    def operation(frame: Frame) -> None:
        warps = warps_of(frame)
        a, b, c = ([warps.spread(read(frame)) for read in reads] for reads in operands)
        result = matrix.mma(shape, a_type, b_type, c_type, d_type, a, b, c, satfinite, rounding)
        for write, value in zip(writes, result, strict=True):
            write(frame, warps.gather(value))
        counted = frame.chunk.launch.traffic.flops
        counted[a_type] = counted.get(a_type, 0) + flops * warps.count

    return operation


def _matrices(instruction: Instruction) -> int:
    if "m8n8" not in instruction.parts or "b16" not in instruction.parts:
        raise Unsupported("matrices other than 8x8 of b16")
    return next(int(part[1:]) for part in instruction.parts if part in ("x1", "x2", "x4"))


def _row_frame(frame: Frame, count: int) -> tuple[Frame, Array]:
    """The lanes whose addresses name rows (the first ``8 * count`` of each warp), and their positions."""
    warps = warps_of(frame)
    if not warps.whole:
        raise Unsupported("a matrix load or store by a part of a warp")
    positions = np.flatnonzero((frame.lanes & 31) < 8 * count)
    return frame.part(positions), positions


@opcode("ldmatrix")
def _ldmatrix(instruction: Instruction) -> Operation:
    count, trans = _matrices(instruction), "trans" in instruction.parts
    where, _ = address(instruction.operands[1])
    space = state_space(instruction)
    writes = [writer(item, "b32") for item in vector(instruction.operands[0])]
    access = Access("read", 8, 2, instruction)

    def operation(frame: Frame) -> None:
        part, positions = _row_frame(frame, count)
        addresses = frame.full(where(frame))[positions]
        words = [np.broadcast_to(word, (part.n,)) for word in load(part, access, space, addresses)]
        rows = np.stack(words, axis=1).view(np.uint16).reshape(-1, count, 8, 8)
        for write, value in zip(writes, matrix.ldmatrix(rows, trans), strict=True):
            write(frame, value.reshape(-1))

    return operation


@opcode("stmatrix")
def _stmatrix(instruction: Instruction) -> Operation:
    count, trans = _matrices(instruction), "trans" in instruction.parts
    where, _ = address(instruction.operands[0])
    space = state_space(instruction)
    reads = [reader(item, "b32") for item in vector(instruction.operands[1])]
    access = Access("write", 8, 2, instruction)

    def operation(frame: Frame) -> None:
        part, positions = _row_frame(frame, count)
        warps = warps_of(frame)
        rows = matrix.stmatrix([warps.spread(read(frame)) for read in reads], trans)
        words = rows.reshape(part.n, 8).view(np.uint64)
        values = [np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])]
        store(part, access, space, frame.full(where(frame))[positions], values)

    return operation


@opcode("movmatrix")
def _movmatrix(instruction: Instruction) -> Operation:
    read, write = reader(instruction.operands[1], "b32"), writer(instruction.operands[0], "b32")

    def operation(frame: Frame) -> None:
        warps = warps_of(frame)
        write(frame, warps.gather(matrix.movmatrix(np.ascontiguousarray(warps.spread(read(frame))))))

    return operation
