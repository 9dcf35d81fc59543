"""Warp-level communication (PTX ISA 9.7.9.6, 9.7.13): ``shfl vote match redux elect activemask``.

The machine has already seen to it that the lanes a member mask names are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mkb_env.devices.simulator.decode import Array, Operation, Unsupported, last_type, opcode, pair, reader, writer
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction
from mkb_env.devices.simulator.parser import TYPE_BYTES
from mkb_env.devices.simulator.warps import LANES, from_mask, to_mask, warps_of


@opcode("shfl")
def _shfl(instruction: Instruction) -> Operation:
    """PTX ISA 9.7.9.6: c holds the clamp value in bits 0-4 and the segment mask in bits 8-12."""
    mode = next(part for part in instruction.parts if part in ("up", "down", "bfly", "idx"))
    destination, predicate = pair(instruction.operands[0])
    value_reader = reader(instruction.operands[1], "b32")
    amount_reader, limit_reader = reader(instruction.operands[2], "u32"), reader(instruction.operands[3], "u32")
    write, write_predicate = writer(destination, "b32"), writer(predicate, "pred")

    def operation(frame: Frame) -> None:
        value, amount, limit = value_reader(frame), amount_reader(frame), limit_reader(frame)
        if len(value) == 1 and predicate is None:
            write(frame, value)
            return
        warps = warps_of(frame)
        b = amount.astype(np.int64) & 31
        c = limit.astype(np.int64)
        if len(b) == 1 and len(c) == 1:
            source, inside = shuffle_source(mode, LANES, b, c)
            result = warps.spread(value)[:, source]
            write(frame, warps.gather(result))
            write_predicate(frame, warps.gather(np.broadcast_to(inside, (warps.count, 32))))
            return
        lane = np.broadcast_to(LANES, (warps.count, 32))
        source, inside = shuffle_source(mode, lane, warps.spread(b), warps.spread(c))
        result = np.take_along_axis(warps.spread(value), source, axis=1)
        write(frame, warps.gather(result))
        write_predicate(frame, warps.gather(inside))

    return operation


def shuffle_source(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """(lane to read, whether it is inside the segment) for each lane; outside lanes read themselves."""
    clamp, segment = c & 31, (c >> 8) & 31
    inside: Array
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - b
        inside = source >= highest
    elif mode == "down":
        source = lane + b
        inside = source <= highest
    elif mode == "bfly":
        source = lane ^ b
        inside = source <= highest
    else:
        source = lowest | (b & ~segment)
        inside = source <= highest
    return np.where(inside, source, lane) & 31, inside


@opcode("vote")
def _vote(instruction: Instruction) -> Operation:
    mode = next(part for part in instruction.parts if part in ("all", "any", "uni", "ballot"))
    read = reader(instruction.operands[1], "pred")
    member_reader = reader(instruction.operands[2], "u32") if len(instruction.operands) > 2 else None
    write = writer(instruction.operands[0], "b32" if mode == "ballot" else "pred")

    def operation(frame: Frame) -> None:
        warps = warps_of(frame)
        flags = warps.spread(read(frame)) & warps.active
        members = warps.active
        if member_reader is not None:
            masks = member_reader(frame)
            if len(masks) > 1 or masks[0] != 0xFFFFFFFF:
                members = members & from_mask(warps.spread(masks).max(axis=1))
        flags = flags & members
        if mode == "ballot":
            write(frame, warps.gather(to_mask(flags)[:, None]))
            return
        every, some = np.all(flags | ~members, axis=1), np.any(flags, axis=1)
        result: Array = {"all": every, "any": some, "uni": every | ~some}[mode]
        write(frame, warps.gather(result[:, None]))

    return operation


@opcode("activemask")
def _activemask(instruction: Instruction) -> Operation:
    write = writer(instruction.operands[0], "b32")

    def operation(frame: Frame) -> None:
        warps = warps_of(frame)
        write(frame, warps.gather(warps.masks()[:, None]))

    return operation


@opcode("elect")
def _elect(instruction: Instruction) -> Operation:
    """The lowest lane of the member mask leads."""
    destination, predicate = pair(instruction.operands[0])
    read = reader(instruction.operands[1], "u32")
    write, write_predicate = writer(destination, "b32"), writer(predicate, "pred")

    def operation(frame: Frame) -> None:
        warps = warps_of(frame)
        members = from_mask(warps.spread(read(frame)).max(axis=1)) & warps.active
        leader = members.argmax(axis=1)[:, None]
        write(frame, warps.gather(leader.astype(np.uint32)))
        write_predicate(frame, warps.gather(leader == LANES))

    return operation


@opcode("match")
def _match(instruction: Instruction) -> Operation:
    everyone = "all" in instruction.parts
    kind = last_type(instruction)
    destination, predicate = pair(instruction.operands[0])
    read = reader(instruction.operands[1], kind)
    write, write_predicate = writer(destination, "b32"), writer(predicate, "pred")

    def operation(frame: Frame) -> None:
        warps = warps_of(frame)
        value = warps.spread(read(frame))
        same = (value[:, :, None] == value[:, None, :]) & warps.active[:, None, :]
        masks = np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(warps.count, 32)
        if everyone:
            whole = warps.masks()[:, None]
            agree = (masks == whole) | ~warps.active
            all_agree = agree.all(axis=1, keepdims=True)
            write_predicate(frame, warps.gather(all_agree))
            masks = np.where(all_agree, np.broadcast_to(whole, masks.shape), np.uint32(0))
        write(frame, warps.gather(masks))

    return operation


_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@opcode("redux")
def _redux(instruction: Instruction) -> Operation:
    kind = last_type(instruction)
    name = next(part for part in instruction.parts if part in _REDUCTIONS)
    if kind == "f32" or TYPE_BYTES[kind] != 4:
        raise Unsupported(f"redux.{name}.{kind}")
    function = _REDUCTIONS[name]
    read, members_reader = reader(instruction.operands[1], kind), reader(instruction.operands[2], "u32")
    write = writer(instruction.operands[0], kind)
    neutral: dict[str, Callable[[np.dtype[Any]], int]] = {
        "min": lambda t: int(np.iinfo(t).max),
        "max": lambda t: int(np.iinfo(t).min),
        "and": lambda t: -1 if t.kind == "i" else int(np.iinfo(t).max),
    }

    def operation(frame: Frame) -> None:
        warps = warps_of(frame)
        value = warps.spread(read(frame))
        members = from_mask(warps.spread(members_reader(frame)).max(axis=1)) & warps.active
        filler = value.dtype.type(neutral[name](value.dtype) if name in neutral else 0)
        # Groups with different masks in one warp would need one pass per mask; compilers do not emit that.
        reduced = function.reduce(np.where(members, value, filler), axis=1, keepdims=True, dtype=value.dtype)
        write(frame, warps.gather(reduced))

    return operation
