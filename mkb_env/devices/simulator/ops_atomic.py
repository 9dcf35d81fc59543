"""Atomics (PTX ISA 9.7.13 ``atom``, ``red``): lanes that meet at one address are served in lane order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from mkb_env.devices.simulator import numerics
from mkb_env.devices.simulator.decode import (
    Array,
    Operation,
    Unsupported,
    address,
    last_type,
    numpy_type,
    opcode,
    reader,
    vector,
    writer,
)
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction
from mkb_env.devices.simulator.memory import Access, locate, offsets
from mkb_env.devices.simulator.ops_float import FLOATS, raw, values
from mkb_env.devices.simulator.ops_memory import state_space, window_masks
from mkb_env.devices.simulator.parser import TYPE_BYTES

Update = Callable[[Array, list[Array]], Array]


def _increment(old: Array, args: list[Array]) -> Array:
    return np.where(old >= args[0], old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old: Array, args: list[Array]) -> Array:
    return np.where((old == 0) | (old > args[0]), args[0], old - old.dtype.type(1))


_UPDATES: dict[str, Update] = {
    "add": lambda old, args: old + args[0],
    "min": lambda old, args: np.minimum(old, args[0]),
    "max": lambda old, args: np.maximum(old, args[0]),
    "and": lambda old, args: old & args[0],
    "or": lambda old, args: old | args[0],
    "xor": lambda old, args: old ^ args[0],
    "exch": lambda old, args: args[0],
    "cas": lambda old, args: np.where(old == args[0], args[1], old),
    "inc": _increment,
    "dec": _decrement,
}


def _update(name: str, kind: str) -> Update:
    """The update on raw bits."""
    if kind in FLOATS:
        bf16 = kind.startswith("bf16")
        functions: dict[str, Callable[[Array, Array], Array]] = {
            "add": lambda a, b: numerics.add(a, b, bf16=bf16),
            "min": numerics.minimum,
            "max": numerics.maximum,
        }
        if name in functions:
            function = functions[name]
            return lambda old, args: raw(function(values(old, kind), values(args[0], kind)), kind)
    signed = kind.startswith("s") and name in ("min", "max")
    if not signed:
        return _UPDATES[name]
    target, plain = numpy_type(kind), _UPDATES[name]
    return lambda old, args: plain(old.view(target), [arg.view(target) for arg in args]).view(old.dtype)


@opcode("atom", "red")
def _atomic(instruction: Instruction) -> Operation:
    if "async" in instruction.parts:
        raise Unsupported("asynchronous reductions")
    returns = instruction.name == "atom"
    kind = last_type(instruction)
    operands = instruction.operands if returns else (None, *instruction.operands)
    nbytes, bits = TYPE_BYTES[kind], f"b{8 * TYPE_BYTES[kind]}"
    if nbytes == 16:
        raise Unsupported("128-bit atomics")
    count = next((int(part[1:]) for part in instruction.parts if part in ("v2", "v4", "v8")), 1)
    name = next(part for part in instruction.parts[1:] if part in _UPDATES)
    access = Access("atomic", nbytes, 1, instruction)
    where, _ = address(operands[1])
    space, update = state_space(instruction), _update(name, kind)
    writes = [writer(item, bits) for item in vector(operands[0])] if returns else []
    # Each vector element is an atomic of its own.
    arguments = [[reader(item, kind) for item in vector(operand)] for operand in operands[2:4]]
    arguments = [group for group in arguments if len(group) == count]
    steps = [np.uint64(nbytes * number) for number in range(count)]

    def operation(frame: Frame) -> None:
        base = frame.full(where(frame))
        for number, step in enumerate(steps):
            args = [frame.full(group[number](frame)) for group in arguments]
            args = [arg.view(f"u{nbytes}") for arg in args]
            old = apply(frame, access, space, base + step, args, update)
            if returns:
                writes[number](frame, old)

    return operation


def apply(frame: Frame, access: Access, space: str, addresses: Array, args: list[Array], update: Update) -> Array:
    """Update memory lane by lane; returns each lane's old value (raw bits)."""
    if space == "":
        masks = window_masks(addresses)
        if len(masks) == 1:
            return apply(frame, access, masks[0][0], addresses - np.uint64(masks[0][1]), args, update)
        old = np.zeros(frame.n, f"u{access.element}")
        for name, base, inside in masks:
            positions = np.flatnonzero(inside)
            local = addresses[positions] - np.uint64(base)
            part_args = [arg[positions] for arg in args]
            old[positions] = apply(frame.part(positions), access, name, local, part_args, update)
        return old
    if space == "shared":
        at = offsets(frame, access, "shared", addresses) // access.element
        return _serve(frame, frame.chunk.data("shared", access.element, 1), at, args, update)
    frame.chunk.launch.traffic.record(access.instruction.line, frame.lanes, addresses, access.total, True)
    total: Array = np.zeros(frame.n, f"u{access.element}")
    for region, lanes in locate(frame, access, addresses):
        inside = addresses if lanes is None else addresses[lanes]
        at = (inside - np.uint64(region.start)).view(np.int64) // access.element
        selected = args if lanes is None else [arg[lanes] for arg in args]
        result = _serve(frame, region.view(access.element, 1), at, selected, update)
        if lanes is None:
            return result
        total[lanes] = result
    return total


def _serve(frame: Frame, data: Array, at: Array, args: list[Array], update: Update) -> Array:
    """Serve lanes in rounds: in round r, the r-th lane of every address. Notes a write only if something changes."""
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    new_address = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.flatnonzero(new_address)
    if len(starts) == len(at):
        old: Array = data[at]
        new = update(old, args)
        frame.chunk.writes += not np.array_equal(old, new)
        data[at] = new
        return old
    rank = np.arange(len(at)) - np.repeat(starts, np.diff(np.append(starts, len(at))))
    by_rank = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[by_rank], np.arange(int(rank.max()) + 2)).tolist()
    served: Array = np.empty(len(at), data.dtype)
    lanes = order[by_rank]
    for begin, end in pairwise(bounds):
        now = lanes[begin:end]
        target = at[now]
        before = data[target]
        served[now] = before
        after = update(before, [arg[now] for arg in args])
        frame.chunk.writes += not np.array_equal(before, after)
        data[target] = after
    return served
