"""One launch, and the part of its grid that runs at a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.base import POISON_BYTE, DeviceFault
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import SHARED_BASE, Program
from mkb_env.devices.simulator.memory import UINT, GlobalMemory
from mkb_env.devices.simulator.schedule import Schedule
from mkb_env.devices.simulator.traffic import Traffic

Array = NDArray[Any]
Dim3 = tuple[int, int, int]
SM_COUNT = 132
_DIMENSIONS = {"x": 0, "y": 1, "z": 2}


@dataclass
class LaunchContext:
    """Everything the lanes of one launch share."""

    program: Program
    memory: GlobalMemory
    params: NDArray[np.uint8]
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_shared: int
    deadline: float
    """``time.thread_time()`` after which a run counts as endless."""
    block_budget: int
    """Basic blocks that may still be executed."""
    schedule: Schedule = field(default_factory=Schedule)
    cooperative: bool = False
    executed_blocks: int = 0
    block_warps: list[int] = field(default_factory=list)
    """Per basic block: how many warps executed it."""
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.threads = math.prod(self.block)
        self.ctas = math.prod(self.grid)
        self.shared_bytes = self.program.static_shared + self.dynamic_shared
        self.block_warps = [0] * len(self.program.blocks)


class Chunk:
    """Blocks ``first`` to ``first + ctas`` of a launch: their lanes, shared and local memory, barriers.

    A lane's slot is its block within the chunk times ``pitch`` (threads per block, rounded up to whole warps) plus its
    linear thread number.
    """

    def __init__(self, launch: LaunchContext, first: int, ctas: int, widths: list[tuple[int, bool]]) -> None:
        self.launch, self.first, self.ctas, self.widths = launch, first, ctas, widths
        self.program, self.memory, self.params = launch.program, launch.memory, launch.params
        self.threads, self.shared_bytes = launch.threads, launch.shared_bytes
        self.pitch = -(-self.threads // 32) * 32
        self.slots = self.pitch * ctas
        lanes = np.arange(self.slots)
        self.padded = self.pitch != self.threads
        if self.padded:
            lanes = lanes[lanes % self.pitch < self.threads]
        self.alive = np.full(ctas, self.threads)
        self.alive_total = len(lanes)
        self.exited = np.zeros(self.slots, bool)
        self.shared_pitch = max(-(-self.shared_bytes // 128) * 128, 128)
        self._shared: NDArray[np.uint8] | None = None
        self._local: NDArray[np.uint8] | None = None
        self.local_pitch = max(-(-launch.program.local_bytes // 32) * 32, 32)
        self._views: dict[tuple[str, int, int], Array] = {}
        self.barriers: dict[int, Any] = {}
        self._zeros: dict[int, Array] = {}
        self.writes = 0
        """Counts what one frame did that another may wait for: writes to memory, arrivals at barriers."""
        self.roots = self._roots(lanes)

    def _roots(self, lanes: Array) -> list[Frame]:
        """A frame for each group of the schedule."""
        launch, warps = self.launch, self.pitch // 32
        if launch.schedule.groups(warps, launch.cooperative) == 1:
            parts = [lanes]
        else:
            rank = launch.schedule.ranks(warps, self.first, self.ctas, launch.cooperative).reshape(-1)[lanes >> 5]
            parts = [lanes[rank == number] for number in np.unique(rank)]
        registers = launch.program.registers
        return [Frame(self, part, [None] * registers, None, None, 0, number) for number, part in enumerate(parts)]

    def data(self, space: str, element: int, count: int) -> Array:
        """Shared or local memory of the whole chunk, as :meth:`Region.view`. Starts as poison."""
        key = (space, element, count)
        if key not in self._views:
            base: NDArray[np.uint8]
            if space == "shared":
                if self._shared is None:
                    self._shared = np.full(self.ctas * self.shared_pitch, POISON_BYTE, np.uint8)
                base = self._shared
            else:
                if self._local is None:
                    self._local = np.full(self.slots * self.local_pitch, POISON_BYTE, np.uint8)
                base = self._local
            flat = base.view(UINT[element])
            self._views[key] = flat.reshape(-1, count) if count > 1 else flat
        return self._views[key]

    def zero(self, register: int) -> Array:
        """The value of a register that was never written."""
        value = self._zeros.get(register)
        if value is None:
            nbytes, predicate = self.widths[register]
            if predicate:
                value = np.zeros(1, bool)
            elif nbytes == 16:
                value = np.zeros((1, 2), np.uint64)
            else:
                value = np.zeros(1, UINT[nbytes])
            self._zeros[register] = value
        return value

    def cta_of(self, frame: Frame) -> Array:
        """Each lane's block within the chunk (int64)."""
        value = frame.cache.get("cta")
        if value is None:
            value = frame.cache["cta"] = frame.lanes // self.pitch
        return value

    def base(self, frame: Frame, space: str) -> Array:
        """Where each lane's shared or local memory starts in :meth:`data`; one element where that is the same."""
        value = frame.cache.get(space)
        if value is None:
            if space == "local":
                value = frame.lanes * self.local_pitch
            else:
                value = self.cta_of(frame) * self.shared_pitch if self.ctas > 1 else np.zeros(1, np.int64)
            frame.cache[space] = value
        return value

    def coordinates(self, slot: int) -> tuple[Dim3, Dim3]:
        """(blockIdx, threadIdx) of a lane."""
        return _unravel(self.first + slot // self.pitch, self.launch.grid), _unravel(
            slot % self.pitch, self.launch.block
        )

    def describe(self, slot: int) -> str:
        """A lane, as fault messages name it."""
        block, thread = self.coordinates(slot)
        return f"thread {thread} in block {block}"

    def special(self, frame: Frame, name: str) -> Array:
        """A special register's value, as uint32 or uint64."""
        launch = self.launch
        stem, _, dimension = name.partition(".")
        axis = _DIMENSIONS.get(dimension, 3)
        if stem in ("tid", "ctaid"):
            if axis == 3 or (launch.block if stem == "tid" else launch.grid)[axis] == 1:
                return np.zeros(1, np.uint32)
            if stem == "tid":
                linear, size = frame.lanes % self.pitch, launch.block
            else:
                linear, size = self.cta_of(frame) + self.first, launch.grid
                if self.ctas == 1:
                    linear = linear[:1]
            linear = linear // math.prod(size[:axis])
            return (linear % size[axis] if axis < 2 else linear).astype(np.uint32)
        uniform = self._uniform(stem, axis)
        if uniform is not None:
            return np.array([uniform], np.uint64 if stem in ("clock64", "globaltimer", "gridid") else np.uint32)
        lane = (frame.lanes & 31).astype(np.uint32)
        if stem == "laneid":
            return lane
        if stem == "warpid":
            return ((frame.lanes % self.pitch) >> 5).astype(np.uint32)
        if stem == "smid":
            return ((self.cta_of(frame) + self.first) % SM_COUNT).astype(np.uint32)
        bit = np.uint32(1) << lane
        match stem:
            case "lanemask_eq":
                return bit
            case "lanemask_lt":
                return bit - np.uint32(1)
            case "lanemask_le":
                return (bit - np.uint32(1)) | bit
            case "lanemask_ge":
                return ~(bit - np.uint32(1))
            case "lanemask_gt":
                return ~((bit - np.uint32(1)) | bit)
        raise DeviceFault("unsupported", f"special register %{name} is not simulated", self.program.name)

    def _uniform(self, stem: str, axis: int) -> int | None:
        launch = self.launch
        if stem in ("ntid", "nctaid", "nclusterid"):
            size: tuple[int, ...] = launch.block if stem == "ntid" else launch.grid
            if stem == "nclusterid":
                size = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
            return size[axis] if axis < 3 else 1
        nanoseconds, shared = time.time_ns(), self.shared_bytes + SHARED_BASE
        values = {
            "nwarpid": self.pitch // 32, "nsmid": SM_COUNT, "gridid": 0,
            "cluster_ctarank": 0, "cluster_nctarank": 1, "cluster_ctaid": 0, "cluster_nctaid": 1,
            "is_explicit_cluster": 0,
            # No real cycle count: eight for each basic block executed.
            "clock": launch.executed_blocks * 8 & 0xFFFFFFFF, "clock64": launch.executed_blocks * 8, "clock_hi": 0,
            "globaltimer": nanoseconds, "globaltimer_lo": nanoseconds & 0xFFFFFFFF, "globaltimer_hi": nanoseconds >> 32,
            "dynamic_smem_size": launch.dynamic_shared, "total_smem_size": shared, "aggr_smem_size": shared,
            "reserved_smem_offset_begin": 0, "reserved_smem_offset_end": SHARED_BASE,
            "reserved_smem_offset_cap": SHARED_BASE,
        }  # fmt: skip
        return values.get(stem)


def _unravel(linear: int, size: Dim3) -> Dim3:
    return linear % size[0], linear // size[0] % size[1], linear // (size[0] * size[1])
