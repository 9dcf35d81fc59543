"""The stand-in CUDA libraries (``driver/``): where they are, and how they come first.

This module imports no torch: a CUDA build of it may bring the real libraries.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

FOLDER = Path(__file__).parent / "driver"
CUTE_LIBRARY = FOLDER / "libmkb_cute_runtime.so"
DRIVER_LIBRARY = FOLDER / "libcuda.so.1"
TVM_LIBRARIES = (FOLDER / "libcudart.so.13", DRIVER_LIBRARY)


def load_driver() -> ctypes.CDLL:
    """Load the stand-in for ``libcuda.so.1``.

    To be called before anything that looks for a driver (torch, NVRTC, ``cuda.bindings``): by its SONAME it is what
    they all find then. A real driver must not be touched here: a process that has initialised one cannot be forked.
    """
    return ctypes.CDLL(str(DRIVER_LIBRARY), mode=ctypes.RTLD_GLOBAL)


def redirect(library: str, libraries: list[ctypes.CDLL]) -> int:
    """Point the CUDA calls of a loaded library at the stand-ins (see ``driver/redirect.c``); returns how many.

    Raises:
        OSError: if no loaded library has that file name.
    """
    handles = (ctypes.c_void_p * len(libraries))(*(stand_in._handle for stand_in in libraries))
    count = next(stand_in for stand_in in libraries if hasattr(stand_in, "mkb_redirect")).mkb_redirect(
        library.encode(), handles, len(libraries)
    )
    if not count:
        raise OSError(f"{library} is not loaded, or calls no CUDA function")
    return int(count)
