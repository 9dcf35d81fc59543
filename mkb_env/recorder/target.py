"""The device a recording answers as: an H200 (sm_90a), whatever machine records.

Attribute numbers are those of ``CUdevice_attribute`` and ``cudaDeviceAttr`` (the same enumeration); values were read
from an H200 with ``cuDeviceGetAttribute``.
"""

from __future__ import annotations

ARCH = "sm_90a"
NAME = "NVIDIA H200"
CAPABILITY = (9, 0)
SM_COUNT = 132
MEMORY_BYTES = 150_110_011_392
L2_BYTES = 62_914_560
SHARED_OPTIN_BYTES = 232_448
SHARED_PER_SM_BYTES = 233_472
DRIVER_VERSION = 13000

ATTRIBUTES = {
    1: 1024,  # max threads per block
    2: 1024, 3: 1024, 4: 64,  # max block x, y, z
    5: 2147483647, 6: 65535, 7: 65535,  # max grid x, y, z
    8: 49152,  # shared memory per block
    9: 65536,  # constant memory
    10: 32,  # warp size
    11: 2147483647,  # max pitch
    12: 65536,  # registers per block
    13: 1980000,  # clock, kHz
    14: 512,  # texture alignment
    15: 1,  # GPU overlap
    16: SM_COUNT,
    17: 0,  # kernel execution timeout
    18: 0,  # integrated
    19: 1,  # can map host memory
    20: 0,  # compute mode
    31: 1,  # concurrent kernels
    32: 1,  # ECC
    36: 3201000,  # memory clock, kHz
    37: 6144,  # memory bus, bits
    38: L2_BYTES,
    39: 2048,  # threads per SM
    40: 3,  # async engines
    41: 1,  # unified addressing
    75: CAPABILITY[0], 76: CAPABILITY[1],
    78: 1,  # stream priorities
    81: SHARED_PER_SM_BYTES,
    82: 65536,  # registers per SM
    83: 1,  # managed memory
    95: 1,  # cooperative launch
    97: SHARED_OPTIN_BYTES,
    106: 32,  # blocks per SM
    108: 39321600,  # max persisting L2
    109: 134213632,  # max access policy window
    111: 1024,  # reserved shared memory per block
    115: 1,  # memory pools
    120: 1,  # cluster launch
}  # fmt: skip

MAX_ACTIVE_CLUSTERS = {1: 132, 2: 66, 4: 32, 8: 16, 16: 8}
"""Clusters of that many blocks which fit at one block per SM (``cuOccupancyMaxActiveClusters``)."""


def max_active_clusters(size: int) -> int:
    """Clusters of ``size`` blocks that run at once when each block takes a whole SM."""
    return MAX_ACTIVE_CLUSTERS[min(known for known in MAX_ACTIVE_CLUSTERS if known >= min(size, 16))]
