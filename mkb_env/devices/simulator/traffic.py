"""Counts what a launch moves through global and shared memory, cheaply: 32-byte sectors are counted on samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SECTOR = 32
SAMPLE_LANES = 1024
"""Sectors are counted on this many leading lanes of an access, at its executions 0, 1, 2, 3 and then every 16th."""


@dataclass
class AccessCount:
    """Totals of one memory instruction."""

    executions: int = 0
    lanes: int = 0
    sampled_lanes: int = 0
    sampled_sectors: int = 0
    write: bool = False

    @property
    def sectors(self) -> float:
        """Estimated sectors, summed over warps."""
        return self.lanes * self.sampled_sectors / self.sampled_lanes if self.sampled_lanes else 0.0


@dataclass
class Traffic:
    """Totals of a launch, by PTX line of the instruction."""

    accesses: dict[int, AccessCount] = field(default_factory=dict)
    shared_bytes: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    """Operations by unit, where an instruction does more than its class tells (tensor cores)."""

    def record(self, line: int, lanes: Array, addresses: Array, nbytes: int, write: bool) -> None:
        """Note one execution of a global access by ``lanes``, each of ``nbytes`` from its address (uint64)."""
        count = self.accesses.get(line)
        if count is None:
            count = self.accesses[line] = AccessCount(write=write)
        count.lanes += len(lanes)
        if count.executions < 4 or count.executions % 16 == 0:
            taken = min(len(lanes), SAMPLE_LANES)
            warps = (lanes[:taken] >> 5).astype(np.uint64)
            where = addresses[:taken] if len(addresses) > 1 else np.broadcast_to(addresses, (taken,))
            keys = (warps << np.uint64(43)) ^ (where >> np.uint64(5))
            keys.sort()
            distinct = 1 + int(np.count_nonzero(keys[1:] != keys[:-1]))
            wide = max(1, nbytes // SECTOR)
            count.sampled_lanes += taken
            count.sampled_sectors += distinct * wide
        count.executions += 1

    def sectors(self, write: bool) -> float:
        """Estimated sectors loaded or stored."""
        return sum(count.sectors for count in self.accesses.values() if count.write == write)
