"""The device a recording answers as: an H200 (sm_90a), whatever machine records.

Attribute numbers are those of ``CUdevice_attribute`` and ``cudaDeviceAttr`` (the same enumeration); values were read
from an H200 with ``cuDeviceGetAttribute``.
"""

from __future__ import annotations

ARCH = "sm_90a"
NAME = "NVIDIA H200"
CAPABILITY = (9, 0)
SM_COUNT = 132
MEMORY_BYTES = 150_109_880_320
L2_BYTES = 62_914_560
SHARED_OPTIN_BYTES = 232_448
SHARED_PER_SM_BYTES = 233_472
DRIVER_VERSION = 13000

ATTRIBUTES = {
    1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2147483647, 6: 65535, 7: 65535, 8: 49152, 9: 65536, 10: 32,
    11: 2147483647, 12: 65536, 13: 1980000, 14: 512, 15: 1, 16: 132, 17: 0, 18: 0, 19: 1, 20: 0, 21: 131072,
    22: 131072, 23: 65536, 24: 16384, 25: 16384, 26: 16384, 27: 32768, 28: 32768, 29: 2048, 30: 512, 31: 1, 32: 1,
    35: 0, 36: 3201000, 37: 6016, 38: 62914560, 39: 2048, 40: 3, 41: 1, 42: 32768, 43: 2048, 44: 1, 45: 32768,
    46: 32768, 47: 8192, 48: 8192, 49: 32768, 51: 32, 52: 32768, 53: 32768, 54: 2046, 55: 32768, 56: 131072,
    57: 65536, 58: 16384, 59: 16384, 60: 16384, 61: 32768, 62: 2048, 63: 32768, 64: 32768, 65: 2048, 66: 32768,
    67: 32768, 68: 2046, 69: 268435456, 70: 131072, 71: 65000, 72: 2097120, 73: 32768, 74: 32768, 75: 9, 76: 0,
    77: 32768, 78: 1, 79: 1, 80: 1, 81: 233472, 82: 65536, 83: 1, 84: 0, 85: 0, 86: 0, 87: 2, 88: 0, 89: 1, 90: 1,
    91: 1, 92: 0, 93: 0, 94: 0, 95: 1, 96: 1, 97: 232448, 98: 0, 99: 1, 100: 0, 101: 0, 102: 1, 103: 1, 104: 0,
    105: 0, 106: 32, 107: 1, 108: 39321600, 109: 134217728, 110: 1, 111: 1024, 112: 1, 113: 1, 114: 1, 115: 1,
    116: 1, 117: 1, 119: 9, 120: 1, 121: 1, 122: 1, 123: 1, 124: 1, 125: 1, 126: 4, 127: 1, 128: 1, 129: 1, 130: 0,
    131: -1, 132: 0, 133: 0, 134: 0, 135: 0, 136: 0, 137: 0, 138: 0, 141: 1, 142: 1, 143: 0, 144: 1, 145: 1,
    146: 0, 147: 0,
}  # fmt: skip
"""Attribute number -> value, as read from an H200 under driver 580 (without its PCI place)."""

MAX_ACTIVE_CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
"""Clusters of that many blocks which fit at one block per SM, as ``cuOccupancyMaxActiveClusters`` says on an H200."""


def max_active_clusters(size: int) -> int:
    """Clusters of ``size`` blocks that run at once when each block takes a whole SM."""
    return MAX_ACTIVE_CLUSTERS[min(known for known in MAX_ACTIVE_CLUSTERS if known >= min(size, 16))]
