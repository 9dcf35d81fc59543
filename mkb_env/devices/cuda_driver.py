"""The part of the CUDA driver API that replaying a plan needs, through ctypes.

Constants and structures are those of ``cuda.h`` (CUDA 13). Nothing is loaded before :func:`driver` is called.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

SUCCESS = 0
INVALID_VALUE = 1
INVALID_IMAGE = 200
NO_BINARY_FOR_GPU = 209
INVALID_PTX = 218
UNSUPPORTED_PTX_VERSION = 222
NOT_FOUND = 500
LAUNCH_TIMEOUT = 702

# CUfunction_attribute
MAX_THREADS, STATIC_SHARED, LOCAL_BYTES, REGISTERS, MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 0, 1, 3, 4, 8, 14
# CUdevice_attribute
DEVICE_SHARED_OPTIN = 97
# CUlaunchAttributeID
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 2, 4, 6
# CUjit_option
_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES = 5, 6
_LOG_BYTES = 16384

FATBIN_MAGIC = 0xBA55ED50
ELF_MAGIC = b"\x7fELF"
# PROGBITS, SYMTAB, STRTAB, RELA, NOTE, REL, NVIDIA's INFO; other kinds (NOBITS) may occupy no bytes of the file
_ELF_KINDS_IN_FILE = (1, 2, 3, 4, 7, 9, 0x70000000)
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``; ``value`` is the union's 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaError(Exception):
    """A driver call that failed: ``code`` is its CUresult, ``name`` and ``text`` the driver's words for it."""

    def __init__(self, call: str, code: int, name: str, text: str, log: str = "") -> None:
        super().__init__(f"{call}: {name} ({text})" + (f"\n{log}" if log else ""))
        self.call, self.code, self.name, self.text, self.log = call, code, name, text, log


_INT, _UINT, _SIZE, _PTR, _STR = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
_INT_OUT, _SIZE_OUT, _PTR_OUT = ctypes.POINTER(_INT), ctypes.POINTER(_SIZE), ctypes.POINTER(_PTR)
_CONFIG = ctypes.POINTER(LaunchConfig)

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_INT_OUT,),
    "cuDeviceGet": (_INT_OUT, _INT),
    "cuDeviceGetAttribute": (_INT_OUT, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_PTR_OUT, _INT),
    "cuCtxSetCurrent": (_PTR,),
    "cuCtxSynchronize": (),
    "cuCtxResetPersistingL2Cache": (),
    "cuGetErrorName": (_INT, ctypes.POINTER(_STR)),
    "cuGetErrorString": (_INT, ctypes.POINTER(_STR)),
    "cuModuleLoadDataEx": (_PTR_OUT, _STR, _UINT, _INT_OUT, _PTR_OUT),
    "cuModuleUnload": (_PTR,),
    "cuModuleGetFunction": (_PTR_OUT, _PTR, _STR),
    "cuFuncLoad": (_PTR,),
    "cuFuncGetAttribute": (_INT_OUT, _INT, _PTR),
    "cuFuncSetAttribute": (_PTR, _INT, _INT),
    "cuFuncGetParamInfo": (_PTR, _SIZE, _SIZE_OUT, _SIZE_OUT),
    "cuOccupancyMaxActiveClusters": (_INT_OUT, _PTR, _CONFIG),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_INT_OUT, _PTR, _INT, _SIZE),
    "cuLaunchKernelEx": (_CONFIG, _PTR, _PTR_OUT, _PTR_OUT),
    "cuTensorMapEncodeTiled": (_PTR, _INT, _UINT, _PTR, _PTR, _PTR, _PTR, _PTR, _INT, _INT, _INT, _INT),
}


class Driver:
    """Checked calls of ``libcuda.so.1``. Handles are plain integers.

    Every method raises :class:`CudaError` when the driver reports a failure.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._calls: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise OSError(f"libcuda.so.1 has no {name}; a driver for CUDA 12.4 or newer is needed") from None
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._calls[name] = function
        self.launch_kernel = self._calls["cuLaunchKernelEx"]
        """Unchecked ``cuLaunchKernelEx``, for the launch loop: returns the CUresult."""
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise self.error(name, code)

    def error(self, call: str, code: int, log: str = "") -> CudaError:
        """The error that ``call`` reported as ``code``."""
        words = []
        for query in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            found = self._calls[query](code, ctypes.byref(text)) == SUCCESS and text.value
            words.append(found.decode(errors="replace") if found else f"CUDA error {code}")
        return CudaError(call, code, words[0], words[1], log)

    def version(self) -> str:
        """Newest CUDA version that the driver supports, for example ``13.0``."""
        number = self._get("cuDriverGetVersion")
        return f"{number // 1000}.{number % 1000 // 10}"

    def _get(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _get_handle(self, name: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def primary_context(self, ordinal: int) -> int:
        """The context that torch uses on device ``ordinal``; held until the process ends."""
        return self._get_handle("cuDevicePrimaryCtxRetain", self._get("cuDeviceGet", ordinal))

    def set_current(self, context: int) -> None:
        """Make ``context`` the calling thread's."""
        self._call("cuCtxSetCurrent", context)

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        """``cuDeviceGetAttribute``."""
        return self._get("cuDeviceGetAttribute", attribute, self._get("cuDeviceGet", ordinal))

    def synchronize(self) -> None:
        """Wait for everything enqueued in the current context."""
        self._call("cuCtxSynchronize")

    def reset_persisting_l2(self) -> None:
        """``cuCtxResetPersistingL2Cache``."""
        self._call("cuCtxResetPersistingL2Cache")

    def load_module(self, image: bytes) -> int:
        """Load a cubin, a fatbin or PTX text (null-terminated here). The error carries the JIT compiler's log."""
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        module = ctypes.c_void_p()
        code = self._calls["cuModuleLoadDataEx"](ctypes.byref(module), image, 2, options, values)
        if code:
            raise self.error("cuModuleLoadDataEx", code, log.value.decode(errors="replace").strip())
        return module.value or 0

    def unload_module(self, module: int) -> None:
        """``cuModuleUnload``."""
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        """The kernel ``name``, loaded now: a lazily loaded one would break the first stream capture."""
        function = self._get_handle("cuModuleGetFunction", module, name.encode())
        self._call("cuFuncLoad", function)
        return function

    def function_attribute(self, attribute: int, function: int) -> int:
        """``cuFuncGetAttribute``."""
        return self._get("cuFuncGetAttribute", attribute, function)

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        """``cuFuncSetAttribute``."""
        self._call("cuFuncSetAttribute", function, attribute, value)

    def parameter_sizes(self, function: int) -> tuple[int, ...]:
        """Size in bytes of each parameter that ``function`` declares."""
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while True:
            call = self._calls["cuFuncGetParamInfo"]
            code = call(function, len(sizes), ctypes.byref(offset), ctypes.byref(size))
            if code == INVALID_VALUE:
                return tuple(sizes)
            if code:
                raise self.error("cuFuncGetParamInfo", code)
            sizes.append(size.value)

    def active_clusters(self, function: int, config: LaunchConfig) -> int:
        """How many clusters of ``config`` the device can hold at once; 0: none fits."""
        return self._get("cuOccupancyMaxActiveClusters", function, ctypes.byref(config))

    def blocks_per_multiprocessor(self, function: int, threads: int, shared_bytes: int) -> int:
        """How many blocks one multiprocessor can hold at once."""
        return self._get("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared_bytes)

    def encode_tensor_map(self, destination: int, address: int, arguments: Sequence[Any]) -> None:
        """Write a 128-byte descriptor to ``destination`` (64-byte aligned) for global memory at ``address``.

        ``arguments`` come from :func:`tensor_map_arguments`.
        """
        dtype, rank, *rest = arguments
        self._call("cuTensorMapEncodeTiled", destination, dtype, rank, address, *rest)


@functools.cache
def driver() -> Driver:
    """The process's driver. Raises OSError without ``libcuda.so.1``, :class:`CudaError` if it cannot be initialised."""
    return Driver()


def launch_config(
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    cluster: Sequence[int],
    cooperative: bool,
    programmatic: bool,
) -> LaunchConfig:
    """A launch configuration on the default stream; it keeps its attributes alive.

    A cluster of (1, 1, 1) is left out, so that a kernel with a cluster size of its own keeps it.
    """
    attributes = []
    if tuple(cluster) != (1, 1, 1):
        attributes.append((CLUSTER_DIMENSION, tuple(cluster)))
    if cooperative:
        attributes.append((COOPERATIVE, (1,)))
    if programmatic:
        attributes.append((PROGRAMMATIC_SERIALIZATION, (1,)))
    array = (LaunchAttribute * max(1, len(attributes)))()
    for slot, (number, values) in zip(array, attributes, strict=False):
        slot.id = number
        slot.value[: len(values)] = values
    return LaunchConfig(
        grid=tuple(grid),
        block=tuple(block),
        shared_bytes=shared_bytes,
        attributes=array,
        attribute_count=len(attributes),
    )


def tensor_map_arguments(
    dtype: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    modes: tuple[int, int, int, int],
) -> tuple[Any, ...]:
    """Arguments of ``cuTensorMapEncodeTiled`` as C arrays: dtype, rank, arrays, then interleave, swizzle, L2 promotion
    and out-of-bounds fill.
    """
    rank = len(dims)
    return (
        dtype,
        rank,
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*element_strides),
        *modes,
    )


def check_image(image: bytes) -> None:
    """Check that the sizes in an image's headers stay within it: the driver trusts them and would read beyond.

    Raises:
        ValueError: saying what lies outside, or that the bytes are neither a cubin nor a fatbin.
    """
    try:
        if image[:4] == ELF_MAGIC:
            _check_elf(image)
        elif len(image) >= 16 and struct.unpack_from("<I", image)[0] == FATBIN_MAGIC:
            header, body = struct.unpack_from("<HQ", image, 6)
            if header + body > len(image):
                raise ValueError(f"a fatbin of {header + body} bytes was cut to {len(image)}")
        else:
            raise ValueError(f"neither a cubin nor a fatbin: it starts with {image[:8].hex() or 'nothing'}")
    except struct.error:
        raise ValueError(f"a cubin was cut to {len(image)} bytes") from None


def _check_elf(image: bytes) -> None:
    if image[4:6] != b"\x02\x01":
        raise ValueError("a cubin must be a 64-bit little-endian ELF file")
    program_table, section_table = struct.unpack_from("<QQ", image, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", image, 54)
    if (program_count and program_size != 56) or (section_count and section_size != 64):
        raise ValueError(f"a cubin's table entries have {program_size} and {section_size} bytes, expected 56 and 64")
    ends = [program_table + program_count * program_size, section_table + section_count * section_size]
    for entry in range(program_count):
        offset, _, _, size = struct.unpack_from("<QQQQ", image, program_table + entry * program_size + 8)
        ends.append(offset + size)
    for entry in range(section_count):
        start = section_table + entry * section_size
        (kind,) = struct.unpack_from("<I", image, start + 4)
        offset, size = struct.unpack_from("<QQ", image, start + 24)
        if kind in _ELF_KINDS_IN_FILE:
            ends.append(offset + size)
    if max(ends) > len(image):
        raise ValueError(f"a cubin of {max(ends)} bytes was cut to {len(image)}")
