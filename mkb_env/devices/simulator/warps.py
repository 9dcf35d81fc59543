"""Values of a frame arranged by warp: arrays of shape (warps, 32)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.simulator.frame import Frame

Array = NDArray[Any]
LANES = np.arange(32)


class Warps:
    """Which warps a frame's lanes belong to."""

    def __init__(self, frame: Frame) -> None:
        self.n = frame.n
        self.whole = frame.n % 32 == 0 and frame.n == 32 * frame.warps
        if self.whole:
            self.count = frame.warps
            self.active = np.ones((self.count, 32), bool)
            return
        number = frame.lanes >> 5
        changes = number[1:] != number[:-1]
        self.rows = np.concatenate(([0], np.cumsum(changes)))
        self.numbers = number[np.concatenate(([True], changes))]
        """Which warp of the chunk each row is."""
        self.columns = frame.lanes & 31
        self.count = int(self.rows[-1]) + 1
        self.active = np.zeros((self.count, 32), bool)
        self.active[self.rows, self.columns] = True

    def spread(self, value: Array) -> Array:
        """One element per lane to (warps, 32); absent lanes are 0."""
        if len(value) != self.n:
            value = value.repeat(self.n)
        if self.whole:
            return value.reshape(-1, 32)
        result = np.zeros((self.count, 32), value.dtype)
        result[self.rows, self.columns] = value
        return result

    def gather(self, value: Array) -> Array:
        """(warps, 32), or one value per warp as (warps, 1), to one element per lane."""
        if value.shape[1] == 1:
            value = value.repeat(32, axis=1)
        if self.whole:
            return np.ascontiguousarray(value).reshape(-1)
        result: Array = value[self.rows, self.columns]
        return result

    def masks(self) -> Array:
        """Active lanes of each warp as bits, uint32 of shape (warps,)."""
        return to_mask(self.active)


def to_mask(flags: Array) -> Array:
    """(warps, 32) booleans to one uint32 per warp, lane 0 the least significant bit."""
    packed = np.packbits(np.ascontiguousarray(flags), axis=1, bitorder="little")
    masks: Array = np.ascontiguousarray(packed).view(np.uint32).reshape(-1)
    return masks


def from_mask(masks: Array) -> Array:
    """Inverse of :func:`to_mask`."""
    flags: Array = (masks[:, None] >> LANES.astype(np.uint32) & np.uint32(1)).astype(bool)
    return flags


def warps_of(frame: Frame) -> Warps:
    """The frame's arrangement, computed once."""
    found = frame.cache.get("warps")
    if found is None:
        found = frame.cache["warps"] = Warps(frame)
    result: Warps = found
    return result
