"""Simulated memory: address space, bounds and alignment checks, vectorised loads and stores.

Every buffer gets an address of its own, 256-byte aligned and with gaps around it, so that an overrun hits nothing.
Generic addresses of shared and local memory lie in windows below the buffers. Faults read like compute-sanitizer's.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.instructions import SHARED_BASE, Instruction

if TYPE_CHECKING:
    from mkb_env.devices.simulator.frame import Frame

Array = NDArray[Any]
SHARED_WINDOW = 0x0100_0000_0000
LOCAL_WINDOW = 0x0200_0000_0000
PARAM_WINDOW = 0x0300_0000_0000
WINDOW_BYTES = 1 << 32
MODULE_BASE = 0x1000_0000_0000
"""Module-scope variables lie from here on, buffers from BUFFER_BASE on."""
BUFFER_BASE = 0x7F00_0000_0000
GAP = 1 << 21
"""Least distance in bytes between two buffers."""
UINT: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}


@dataclass
class Region:
    """A buffer at its simulated address, with its traffic since the counters were last cleared."""

    name: str
    start: int
    data: NDArray[np.uint8]
    views: dict[tuple[int, int], Array] = field(default_factory=dict)
    low: int = 1 << 62
    high: int = 0
    """Lowest and highest byte offsets touched."""

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def view(self, element: int, count: int) -> Array:
        """The bytes as elements of ``element`` bytes, in rows of ``count`` where that is more than one."""
        key = (element, count)
        if key not in self.views:
            whole = len(self.data) // (element * count) * (element * count)
            flat = self.data[:whole].view(UINT[element])
            self.views[key] = flat.reshape(-1, count) if count > 1 else flat
        return self.views[key]

    def touch(self, low: int, high: int) -> None:
        """Note an access of the addresses ``low`` to ``high`` (exclusive)."""
        if low - self.start < self.low:
            self.low = low - self.start
        if high - self.start > self.high:
            self.high = high - self.start


class GlobalMemory:
    """The buffers of a bound plan and the variables of its modules."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.regions: list[Region] = []

    def place(self, buffers: list[tuple[str, NDArray[np.uint8]]], seed: int) -> list[int]:
        """Give buffers addresses, in an order and with gaps that depend on ``seed``; returns the addresses."""
        generator = random.Random(seed)
        order = list(range(len(buffers)))
        generator.shuffle(order)
        addresses = [0] * len(buffers)
        at = BUFFER_BASE + 256 * generator.randrange(1, 4096)
        for number in order:
            name, data = buffers[number]
            addresses[number] = at
            self.add(Region(name, at, data))
            at += -(-len(data) // 256) * 256 + GAP + 256 * generator.randrange(4096)
        return addresses

    def add(self, region: Region) -> None:
        """Add a region that overlaps no other."""
        position = bisect_right(self.starts, region.start)
        self.starts.insert(position, region.start)
        self.regions.insert(position, region)

    def find(self, address: int) -> Region | None:
        """The region that holds ``address``, if any."""
        position = bisect_right(self.starts, address) - 1
        if position < 0:
            return None
        region = self.regions[position]
        return region if address < region.end else None

    def nearest(self, address: int) -> str:
        """Where ``address`` lies relative to the nearest region, as text."""
        best = min(self.regions, key=lambda r: max(r.start - address, address - r.end, 0), default=None)
        if best is None:
            return "where no buffer exists"
        if address < best.start:
            return f"{best.start - address} bytes before {best.name} of {len(best.data)} bytes"
        if address >= best.end:
            past = f"{address - best.end} bytes past" if address > best.end else "right at"
            return f"{past} the end of {best.name} of {len(best.data)} bytes"
        return f"{address - best.start} bytes into {best.name} of {len(best.data)} bytes"


@dataclass(frozen=True)
class Access:
    """What an instruction does to memory: ``count`` elements of ``element`` bytes, one after the other."""

    kind: str
    """``read``, ``write`` or ``atomic``."""
    element: int
    count: int
    instruction: Instruction

    @property
    def total(self) -> int:
        return self.element * self.count


def fault(frame: Frame, access: Access, space: str, problem: str, addresses: Array, bad: Array) -> DeviceFault:
    """A compute-sanitizer-like report on the first lane for which ``bad`` holds."""
    lane = int(np.flatnonzero(np.broadcast_to(bad, (frame.n,)))[0])
    address = int(addresses[lane if len(addresses) > 1 else 0])
    chunk, instruction = frame.chunk, access.instruction
    where = chunk.describe(int(frame.lanes[lane]))
    if space == "global":
        detail = chunk.memory.nearest(address)
    elif space == "shared":
        size = chunk.shared_bytes
        at = address - SHARED_BASE
        past = f"{at + access.total - size} bytes past" if at + access.total > size else "not past"
        detail = f"at byte offset {at} of the block's {size} bytes of shared memory, {past} its end"
    else:
        detail = f"at byte offset {address} of the thread's {chunk.program.local_bytes} bytes of {space} memory"
    number = int(np.count_nonzero(np.broadcast_to(bad, (frame.n,))))
    text = (
        f"Invalid __{space}__ {access.kind} of size {access.total} bytes: address 0x{address:x} is {problem}\n"
        f"  at PTX line {instruction.line} of {chunk.program.name}: {instruction.text}\n"
        f"  by {where}" + (f" and {number - 1} other threads" if number > 1 else "") + f"\n  it starts {detail}"
    )
    return DeviceFault("launch_error", text, chunk.program.name)


def locate(frame: Frame, access: Access, addresses: Array) -> list[tuple[Region, Array | None]]:
    """The regions that global ``addresses`` (uint64) fall into, each with its lanes' positions (None: all).

    Raises:
        DeviceFault: for an address that is misaligned or, with the bytes that follow, in no single region.
    """
    memory, total = frame.chunk.memory, access.total
    if access.kind == "write":
        frame.chunk.writes += 1
    low, high = int(addresses.min()), int(addresses.max())
    if total > 1 and int(np.bitwise_or.reduce(addresses)) & (total - 1):
        bad = (addresses & np.uint64(total - 1)) != 0
        raise fault(frame, access, "global", f"misaligned, expected a multiple of {total}", addresses, bad)
    region = memory.find(low)
    if region is not None and high + total <= region.end:
        region.touch(low, high + total)
        return [(region, None)]
    where = np.searchsorted(np.array(memory.starts, np.uint64), addresses, side="right") - 1
    ends = np.array([0, *(region.end for region in memory.regions)], np.uint64)
    bad = addresses + np.uint64(total) > ends[where + 1]
    if bad.any():
        raise fault(frame, access, "global", "out of bounds", addresses, bad)
    found: list[tuple[Region, Array | None]] = []
    for number in np.unique(where):
        positions = np.flatnonzero(where == number)
        region = memory.regions[int(number)]
        inside = addresses[positions]
        region.touch(int(inside.min()), int(inside.max()) + total)
        found.append((region, positions))
    return found


def offsets(frame: Frame, access: Access, space: str, addresses: Array) -> Array:
    """Byte positions (int64) within the chunk's shared or local memory of lanes' ``addresses``. Raises DeviceFault."""
    chunk, total = frame.chunk, access.total
    if access.kind == "write":
        chunk.writes += 1
    size, base = (chunk.shared_bytes, SHARED_BASE) if space == "shared" else (chunk.program.local_bytes, 0)
    at = addresses.astype(np.int64)
    if base:
        at -= base
    low, high = int(at.min()), int(at.max())
    if low < 0 or high + total > size:
        raise fault(frame, access, space, "out of bounds", addresses, (at < 0) | (at + total > size))
    if total > 1 and int(np.bitwise_or.reduce(at)) & (total - 1):
        bad = (at & (total - 1)) != 0
        raise fault(frame, access, space, f"misaligned, expected a multiple of {total}", addresses, bad)
    return at + chunk.base(frame, space)


def take(data: Array, at: Array, element: int, count: int) -> list[Array]:
    """``count`` arrays of elements from byte positions ``at`` (multiples of ``element * count``)."""
    if count == 1:
        return [data.take(at >> SHIFT[element] if element > 1 else at)]
    rows = data.take(at >> SHIFT[element * count], axis=0)
    return [np.ascontiguousarray(rows[:, number]) for number in range(count)]


def put(data: Array, at: Array, element: int, values: list[Array]) -> None:
    """Inverse of :func:`take`; of lanes that write one address the last wins."""
    if len(values) == 1:
        data[at >> SHIFT[element] if element > 1 else at] = values[0]
        return
    rows = np.empty((len(at), len(values)), UINT[element])
    for number, value in enumerate(values):
        rows[:, number] = value
    data[at >> SHIFT[element * len(values)]] = rows
