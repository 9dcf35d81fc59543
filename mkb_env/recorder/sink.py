"""The Python end of the stand-in libraries: their callbacks write launches and memory operations to a tape."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from mkb_env.plan import Copy, Fill, TensorView, Upload
from mkb_env.recorder import target
from mkb_env.recorder.modules import image_bytes
from mkb_env.recorder.tape import Descriptor, HostRefusal, Tape

U32 = ctypes.POINTER(ctypes.c_uint)
U64 = ctypes.POINTER(ctypes.c_uint64)
POINTERS = ctypes.POINTER(ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, U32, U32, ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p, POINTERS
)
TENSOR_MAP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, U32, ctypes.c_uint64, U64, U64, U32, U32)
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, U64)
SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64)
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
REFUSE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)

LAUNCH_ATTRIBUTE_BYTES = 72
COOPERATIVE, CLUSTER, PROGRAMMATIC, PRIORITY = 2, 4, 6, 8
IGNORED_ATTRIBUTES = {PRIORITY, 1, 3}  # priority, access-policy window, synchronization policy: no effect on results
CUDA_ERROR = 999


class _Table(ctypes.Structure):
    _fields_ = [
        ("launch", LAUNCH), ("tensor_map", TENSOR_MAP), ("allocate", ALLOCATE), ("set", SET), ("copy", COPY),
        ("attribute", ATTRIBUTE), ("refuse", REFUSE),
    ]  # fmt: skip


class Sink:
    """Connects the libraries of one process to a tape.

    The first refusal or fault inside a callback is kept in ``tape.refusal``: it cannot travel through C, and the DSL
    would only see an error number.
    """

    def __init__(self, tape: Tape, libraries: list[ctypes.CDLL]) -> None:
        self.tape = tape
        self._table = _Table(
            LAUNCH(self._guard(self._launch)),
            TENSOR_MAP(self._guard(self._tensor_map)),
            ALLOCATE(self._guard(self._allocate)),
            SET(self._guard(self._set)),
            COPY(self._guard(self._copy)),
            ATTRIBUTE(lambda number: target.ATTRIBUTES.get(number, -1)),
            REFUSE(self._guard(self._refuse)),
        )
        for library in libraries:
            library.mkb_set_sink(ctypes.byref(self._table))

    def _guard(self, callback: Callable[..., None]) -> Callable[..., int]:
        def guarded(*args: Any) -> int:
            try:
                callback(*args)
            except HostRefusal as refusal:
                self.tape.refusal = self.tape.refusal or refusal
                return CUDA_ERROR
            return 0

        return guarded

    def _launch(
        self, name: bytes, image: int, grid: Any, block: Any, shared: int, count: int, attributes: int, params: Any
    ) -> None:
        kernel = name.decode()
        module = self.tape.image_of(image_bytes(image), kernel)
        sizes = self.tape.compiled[module].param_sizes(kernel) or []
        options = launch_attributes(count, attributes)
        raw = [ctypes.string_at(params[i], size) for i, size in enumerate(sizes)]
        self.tape.launch(module, kernel, dim3(grid), dim3(block), shared, raw, **options)

    def _tensor_map(
        self, out: int, numbers: Any, address: int, dims: Any, strides: Any, box: Any, element: Any
    ) -> None:
        dtype, rank, interleave, swizzle, l2, oob = (numbers[i] for i in range(6))
        if not 1 <= rank <= 5:
            raise HostRefusal(f"a tensor map has 1 to 5 dimensions, got {rank}")
        place = self.tape.locate(address)
        if place is None:
            raise HostRefusal("a tensor map must describe a tensor of the target device")
        token = b"MKBTMAP!" + len(self.tape.descriptors).to_bytes(8, "little") + b"\xa5" * 112
        self.tape.descriptors.append(
            Descriptor(
                token,
                *place,
                {"dtype": dtype, "interleave": interleave, "swizzle": swizzle, "l2_promotion": l2, "oob_fill": oob},
                tuple(dims[i] for i in range(rank)),
                tuple(strides[i] for i in range(rank - 1)),
                tuple(box[i] for i in range(rank)),
                tuple(element[i] for i in range(rank)),
            )
        )
        ctypes.memmove(out, token, len(token))

    def _allocate(self, nbytes: int, address: Any) -> None:
        address[0] = self.tape.regions[self.tape.allocate(nbytes)].address

    def _set(self, address: int, value: int, nbytes: int) -> None:
        if nbytes:
            self.tape.add(Fill(self._bytes(address, nbytes, "cudaMemset"), value & 0xFF))

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        if not nbytes:
            return
        place = self.tape.locate(source)
        if self.tape.locate(to) is None:
            if place and self.tape.regions[place[0]].readable:
                ctypes.memmove(to, source, nbytes)
                return
            raise HostRefusal("cudaMemcpy reads tensor data on the host: tensors have no data while recording")
        view = self._bytes(to, nbytes, "cudaMemcpy")
        if place is None:
            self.tape.add(Upload(view, ctypes.string_at(source, nbytes)))
        else:
            self.tape.add(Copy(view, self._bytes(source, nbytes, "cudaMemcpy")))

    def _bytes(self, address: int, nbytes: int, doing: str) -> TensorView:
        place = self.tape.locate(address)
        if place is None or place[1] + nbytes > self.tape.regions[place[0]].nbytes:
            raise HostRefusal(f"{doing} of {nbytes} bytes at {address:#x} leaves the tensors of this call")
        return TensorView(place[0], place[1], (nbytes,), (1,), "uint8")

    def _refuse(self, name: bytes) -> None:
        raise HostRefusal(
            f"{name.decode().lstrip('_')} is not available: the host code is recorded, as under CUDA-graph capture"
        )


def launch_attributes(count: int, address: int) -> dict[str, Any]:
    """The launch attributes a plan knows, from an array of ``cudaLaunchAttribute``.

    Raises:
        HostRefusal: for an attribute with an effect that a plan cannot express.
    """
    options: dict[str, Any] = {}
    for i in range(count):
        raw = ctypes.string_at(address + i * LAUNCH_ATTRIBUTE_BYTES, LAUNCH_ATTRIBUTE_BYTES)
        number = int.from_bytes(raw[:4], "little")
        words = [int.from_bytes(raw[8 + 4 * k : 12 + 4 * k], "little") for k in range(3)]
        if number == COOPERATIVE:
            options["cooperative"] = bool(words[0])
        elif number == CLUSTER:
            options["cluster"] = (max(words[0], 1), max(words[1], 1), max(words[2], 1))
        elif number == PROGRAMMATIC:
            options["programmatic"] = bool(words[0])
        elif number not in IGNORED_ATTRIBUTES:
            raise HostRefusal(
                f"launch attribute {number} is not supported; use grid, block, cluster and cooperative launches"
            )
    return options


def dim3(values: Any) -> tuple[int, int, int]:
    """Three unsigned ints as a tuple."""
    return values[0], values[1], values[2]
