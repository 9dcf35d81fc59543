"""Loads, stores and asynchronous copies (PTX ISA 9.7.9). Cache hints and memory orders change nothing here: lanes run
in program order and every write is visible at once.
"""

from __future__ import annotations

import numpy as np

from mkb_env.devices.simulator.decode import (
    Array,
    Operation,
    Reader,
    Unsupported,
    address,
    last_type,
    opcode,
    reader,
    unsigned,
    vector,
    writer,
)
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction, Not, Register, Value
from mkb_env.devices.simulator.memory import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOW_BYTES,
    Access,
    fault,
    locate,
    offsets,
    put,
    take,
)
from mkb_env.devices.simulator.operands import Imm
from mkb_env.devices.simulator.parser import TYPE_BYTES

SPACES = ("global", "shared", "local", "param", "const")


def state_space(instruction: Instruction) -> str:
    """The space that an opcode names; "" is generic."""
    for part in instruction.parts[1:]:
        space = part.split("::")[0]
        if space in SPACES:
            return space
    return ""


def access_of(instruction: Instruction, kind: str) -> Access:
    """What one lane of a load, store or atomic touches."""
    element = TYPE_BYTES[last_type(instruction)]
    count = next((int(part[1:]) for part in instruction.parts if part in ("v2", "v4", "v8")), 1)
    if element == 16:
        element, count = 8, 2 * count
    return Access(kind, element, count, instruction)


def resolve_space(instruction: Instruction, named: str) -> str:
    """The space of an access. Names decide: parameters of an inlined call live in local memory."""
    space = state_space(instruction)
    if space == "param" and named == "local":
        return "local"
    if space == "const":
        return "global"
    return space


def load(frame: Frame, access: Access, space: str, addresses: Array) -> list[Array]:
    """Read ``access.count`` arrays of unsigned elements; one element each where the address is uniform."""
    chunk, element, count = frame.chunk, access.element, access.count
    if space == "global":
        if chunk.launch.traffic is not None:
            chunk.launch.traffic.record(access.instruction.line, frame.lanes, addresses, access.total, False)
        found = locate(frame, access, addresses)
        if len(found) == 1:
            region, _ = found[0]
            at = (addresses - np.uint64(region.start)).view(np.int64)
            return take(region.view(element, count), at, element, count)
        results = [np.zeros(len(addresses), unsigned(element)) for _ in range(count)]
        for region, positions in found:
            at = (addresses[positions] - np.uint64(region.start)).view(np.int64)
            for result, value in zip(results, take(region.view(element, count), at, element, count), strict=True):
                result[positions] = value
        return results
    if space == "param":
        return _load_param(frame, access, addresses)
    if space == "":
        return _by_window(frame, access, addresses, None)
    at = offsets(frame, access, space, addresses)
    return take(chunk.data(space, element, count), at, element, count)


def _load_param(frame: Frame, access: Access, addresses: Array) -> list[Array]:
    params = frame.chunk.params
    at = addresses.astype(np.int64)
    bad = (at < 0) | (at + access.total > len(params))
    if bad.any():
        raise fault(frame, access, "param", "out of bounds", addresses, bad)
    results = []
    for number in range(access.count):
        where = at[:, None] + np.arange(access.element) + number * access.element
        results.append(np.ascontiguousarray(params[where]).view(unsigned(access.element)).reshape(-1))
    return results


def store(frame: Frame, access: Access, space: str, addresses: Array, values: list[Array]) -> None:
    """Write ``values``; where lanes write one address, the last lane wins."""
    chunk, element, count = frame.chunk, access.element, access.count
    if space == "global":
        if chunk.launch.traffic is not None:
            chunk.launch.traffic.record(access.instruction.line, frame.lanes, addresses, access.total, True)
        found = locate(frame, access, addresses)
        for region, positions in found:
            inside, stored = addresses, values
            if positions is not None:
                inside = addresses[positions]
                stored = [value if len(value) == 1 else value[positions] for value in values]
            at = (inside - np.uint64(region.start)).view(np.int64)
            put(region.view(element, count), at, element, _shaped(at, stored))
    elif space == "":
        _by_window(frame, access, addresses, values)
    elif space == "param":
        raise Unsupported("a store to kernel parameters")
    else:
        at = offsets(frame, access, space, addresses)
        put(chunk.data(space, element, count), at, element, _shaped(at, values))


def _shaped(at: Array, values: list[Array]) -> list[Array]:
    """Values for one address: only the last lane's stays."""
    return [value[-1:] for value in values] if len(at) == 1 else values


def window_masks(addresses: Array) -> list[tuple[str, int, Array]]:
    """(space, window base, lanes) for the spaces that generic addresses fall into."""
    found = []
    rest = np.ones(len(addresses), bool)
    for space, base in (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW), ("param", PARAM_WINDOW)):
        inside = (addresses >= np.uint64(base)) & (addresses < np.uint64(base + WINDOW_BYTES))
        if inside.any():
            found.append((space, base, inside))
            rest &= ~inside
    if rest.any():
        found.append(("global", 0, rest))
    return found


def _by_window(frame: Frame, access: Access, addresses: Array, values: list[Array] | None) -> list[Array]:
    """Load or store through generic addresses."""
    if int(addresses.min()) >= PARAM_WINDOW + WINDOW_BYTES:
        if values is None:
            return load(frame, access, "global", addresses)
        store(frame, access, "global", addresses, values)
        return []
    masks = window_masks(addresses)
    if len(masks) == 1:
        space, base, _ = masks[0]
        if values is None:
            return load(frame, access, space, addresses - np.uint64(base))
        store(frame, access, space, addresses - np.uint64(base), values)
        return []
    results = [np.zeros(frame.n, unsigned(access.element)) for _ in range(access.count)]
    for space, base, inside in masks:
        positions = np.flatnonzero(inside)
        part, local = frame.part(positions), addresses[positions] - np.uint64(base)
        if values is None:
            for result, value in zip(results, load(part, access, space, local), strict=True):
                result[positions] = value
        else:
            store(part, access, space, local, [v if len(v) == 1 else v[positions] for v in values])
    return results


@opcode("ld", "ldu")
def _ld(instruction: Instruction) -> Operation:
    destination, source = instruction.operands[:2]
    kind = last_type(instruction)
    access = access_of(instruction, "read")
    where, named = address(source)
    space = resolve_space(instruction, named)
    if kind == "b128":
        return _load_wide(access, where, space, destination)
    writes = [writer(item, kind if kind[0] in "su" else f"b{8 * TYPE_BYTES[kind]}") for item in vector(destination)]
    if len(writes) != access.count:
        raise Unsupported(f"{len(writes)} destinations for {access.count} elements")
    if access.count == 1:
        write = writes[0]
        return lambda frame: write(frame, load(frame, access, space, where(frame))[0])

    def operation(frame: Frame) -> None:
        for write, value in zip(writes, load(frame, access, space, where(frame)), strict=True):
            write(frame, value)

    return operation


def _load_wide(access: Access, where: Reader, space: str, destination: Value | None) -> Operation:
    writes = [writer(item, "b128") for item in vector(destination)]

    def operation(frame: Frame) -> None:
        words = load(frame, access, space, where(frame))
        for number, write in enumerate(writes):
            write(frame, np.stack(words[2 * number : 2 * number + 2], axis=1))

    return operation


@opcode("st")
def _st(instruction: Instruction) -> Operation:
    destination, source = instruction.operands[:2]
    kind = last_type(instruction)
    access = access_of(instruction, "write")
    where, named = address(destination)
    space = resolve_space(instruction, named)
    if kind == "b128":
        return _store_wide(access, where, space, source)
    reads = [reader(item, f"b{8 * TYPE_BYTES[kind]}" if not _literal_float(kind) else kind) for item in vector(source)]
    if len(reads) != access.count:
        raise Unsupported(f"{len(reads)} sources for {access.count} elements")
    raw = unsigned(access.element)
    return lambda frame: store(frame, access, space, where(frame), [read(frame).view(raw) for read in reads])


def _literal_float(kind: str) -> bool:
    return kind in ("f32", "f64")


def _store_wide(access: Access, where: Reader, space: str, source: Value | None) -> Operation:
    reads = [reader(item, "b128") for item in vector(source)]

    def operation(frame: Frame) -> None:
        values = [np.ascontiguousarray(read(frame)[:, word]) for read in reads for word in range(2)]
        store(frame, access, space, where(frame), values)

    return operation


@opcode("cp")
def _cp(instruction: Instruction) -> Operation:
    """``cp.async`` of up to 16 bytes, done at once; groups and waits are then no-ops."""
    parts = instruction.parts
    if parts[1:2] != ("async",) or "bulk" in parts or "mbarrier" in parts:
        raise Unsupported("bulk copies")
    if parts[2] in ("commit_group", "wait_group", "wait_all"):
        return lambda frame: None
    target, _ = address(instruction.operands[0])
    source, _ = address(instruction.operands[1])
    size = instruction.operands[2]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise Unsupported("cp.async of another size than 4, 8 or 16")
    element, count = (8, 2) if size.value == 16 else (size.value, 1)
    reading, writing = Access("read", element, count, instruction), Access("write", element, count, instruction)
    limit = _copied_bytes(instruction, size.value)

    def operation(frame: Frame) -> None:
        destinations, sources = target(frame), source(frame)
        if limit is None:
            store(frame, writing, "shared", destinations, load(frame, reading, "global", sources))
            return
        copied = frame.full(limit(frame))
        values = [np.zeros(frame.n, unsigned(element)) for _ in range(count)]
        positions = np.flatnonzero(copied > 0)
        if len(positions):
            part = frame.part(positions)
            inside = sources if len(sources) == 1 else sources[positions]
            for number, value in enumerate(load(part, reading, "global", inside)):
                kept = np.clip(copied[positions].astype(np.int64) - number * element, 0, element)
                values[number][positions] = value & _low_bytes(kept, element)
        store(frame, writing, "shared", destinations, values)

    return operation


def _low_bytes(count: Array, element: int) -> Array:
    """Masks that keep the first ``count`` bytes of an element."""
    table = [(1 << (8 * number)) - 1 for number in range(element + 1)]
    return np.array(table, unsigned(element))[count]


def _copied_bytes(instruction: Instruction, size: int) -> Reader | None:
    """How many bytes each lane reads (the rest is zero), or None if always all."""
    if len(instruction.operands) < 4:
        return None
    extra = instruction.operands[3]
    if isinstance(extra, Register) and extra.nbytes == 8:
        return None  # a cache policy
    if isinstance(extra, Not) or (isinstance(extra, Register) and extra.predicate):
        ignore = reader(extra, "pred")
        return lambda frame: np.where(ignore(frame), np.uint32(0), np.uint32(size))
    return reader(extra, "u32")
