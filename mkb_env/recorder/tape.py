"""The tape: what a recording has seen so far, turned into a launch plan at the end.

Buffers are reserved, unreadable address space: they have addresses but no data and cost no memory. A pointer in a
kernel's parameters is recognised by falling into one of them. Tensors whose values the host may know (the workload's
geometry, constants) are the exception: their pages hold the values.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import re
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from mkb_env.plan import (
    DTYPE_BYTES,
    MAX_BUFFERS,
    MAX_STEPS,
    MAX_WORKSPACE_BYTES,
    Buffer,
    Copy,
    Fill,
    Image,
    Launch,
    LaunchPlan,
    OutputTree,
    Param,
    Pointer,
    Step,
    TensorMap,
    TensorView,
    Upload,
)
from mkb_env.recorder.modules import Compiled, cubin_registers
from mkb_env.recorder.target import ARCH

FIRST_ADDRESS = 0x6100_0000_0000
LAST_ADDRESS = 0x6F00_0000_0000
ALIGNMENT = 2 << 20  # a large page, as the real allocator's segments
MAP_FIXED_NOREPLACE = 0x100000
MAP_NORESERVE = 0x4000
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class HostRefusal(RuntimeError):
    """The submission's host code asked for something a recording does not allow."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass
class Region:
    """A buffer while recording."""

    address: int
    nbytes: int
    call: int
    """Number of the call of ``solve`` that reserved it, from 1; 0 is the import."""
    input: int | None = None
    readable: bool = False


@dataclass
class Descriptor:
    """A tensor map that host code asked the driver for; ``token`` marks its bytes in a parameter."""

    token: bytes
    region: int
    offset: int
    numbers: dict[str, int]
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]


class Tape:
    """Everything one recording writes down: the import, then one or more calls of ``solve``.

    Memory and compiled modules outlive a call, as in any process, so what a submission caches keeps working. Each
    call's plan begins with the steps of the import.
    """

    def __init__(self, dsl: str) -> None:
        self.dsl = dsl
        self.regions: list[Region] = []
        self.steps: list[Step] = []
        self.compiled: list[Compiled] = []
        self.descriptors: list[Descriptor] = []
        self.refusal: HostRefusal | None = None
        self.call = 0
        self._prologue: list[Step] = []
        self._next = FIRST_ADDRESS
        self._starts: list[int] = []

    def begin_call(self) -> None:
        """What follows belongs to the next call of ``solve``."""
        if self.call == 0:
            self._prologue = self.steps
        self.call += 1
        self.steps = list(self._prologue)

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, input: int | None = None, data: bytes | None = None) -> int:
        """Reserve a buffer and return its index; with ``data``, its pages can be read and hold these bytes.

        Raises:
            HostRefusal: past the plan's limits on buffers and bytes.
        """
        own = sum(region.nbytes for region in self.regions if region.input is None)
        if len(self.regions) >= MAX_BUFFERS:
            raise HostRefusal(f"solve allocates more than {MAX_BUFFERS} tensors")
        if input is None and own + nbytes > MAX_WORKSPACE_BYTES:
            raise HostRefusal(f"outputs and workspaces take more than {MAX_WORKSPACE_BYTES >> 30} GiB")
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        protection = 0 if data is None else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE
        if self._next + size > LAST_ADDRESS:
            raise HostRefusal("solve reserves more address space than a recording has")
        address = libc.mmap(self._next, size, protection, flags, -1, 0)
        if address != self._next:
            raise MemoryError(f"address space at {self._next:#x} is taken")
        self._next += size + ALIGNMENT
        if data:
            ctypes.memmove(address, data, len(data))
        self.regions.append(Region(address, nbytes, self.call, input, data is not None))
        self._starts.append(address)
        return len(self.regions) - 1

    def locate(self, address: int, slack: int = 0) -> tuple[int, int] | None:
        """(buffer, byte offset) of an address inside a buffer (or up to ``slack`` bytes past its end), or None.

        Raises:
            HostRefusal: for an input of an earlier call.
        """
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        region = self.regions[index]
        offset = address - region.address
        if offset >= max(region.nbytes, 1) + slack:
            return None
        if region.input is not None and region.call != self.call:
            raise HostRefusal(f"solve uses input {region.input} of an earlier call; every call has inputs of its own")
        return index, offset

    def view(self, tensor: torch.Tensor) -> TensorView:
        """Where a tensor over reserved memory lies.

        Raises:
            HostRefusal: if it is not one.
        """
        place = self.locate(tensor.data_ptr()) if tensor.numel() else self.locate(tensor.untyped_storage().data_ptr())
        if place is None:
            if not tensor.numel():
                return TensorView(
                    self.allocate(0), 0, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype)
                )
            raise HostRefusal("a CPU tensor was used where a tensor of the target device is needed")
        return TensorView(place[0], place[1], tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))

    def add(self, step: Step) -> None:
        """Append a step. Raises HostRefusal past the plan's limit or when an input would be written."""
        if len(self.steps) >= MAX_STEPS:
            raise HostRefusal(f"solve asks for more than {MAX_STEPS} launches and memory operations")
        if not isinstance(step, Launch) and self.regions[step.target.buffer].input is not None:
            raise HostRefusal(f"solve writes into input {self.regions[step.target.buffer].input}; inputs are read-only")
        self.steps.append(step)

    # -- kernels --------------------------------------------------------------------------------------------------

    def add_module(self, ptx: str, cubin: bytes) -> None:
        """A DSL has compiled a module.

        Raises:
            HostRefusal: if it was compiled for another architecture than the target.
        """
        arch = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
        if arch and arch[1] != ARCH:
            raise HostRefusal(f"the kernel was compiled for {arch[1]}; the target device is {ARCH}")
        self.compiled.append(Compiled(ptx, cubin))

    def image_of(self, image: bytes, kernel: str) -> int:
        """Number of the compiled module that an image handed to the driver came from.

        Raises:
            HostRefusal: if no compilation of this recording made it.
        """
        for number in reversed(range(len(self.compiled))):
            module = self.compiled[number]
            if module.cubin in image and module.param_sizes(kernel) is not None:
                return number
        raise HostRefusal(
            f"kernel {kernel!r} was not compiled by {self.dsl} in this submission; only such kernels may be launched"
        )

    def launch(
        self,
        module: int,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: list[bytes],
        cluster: tuple[int, int, int] = (1, 1, 1),
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        """Append a launch; ``params`` are the raw bytes, in which pointers and tensor maps are found here."""
        packed = tuple(self._param(raw) for raw in params)
        self.add(Launch(module, kernel, grid, block, packed, cluster, shared_bytes, cooperative, programmatic))

    def _param(self, raw: bytes) -> Param:
        data = bytearray(raw)
        maps = []
        for descriptor in self.descriptors:
            at = raw.find(descriptor.token)
            while at >= 0:
                maps.append(
                    TensorMap(
                        offset=at,
                        buffer=descriptor.region,
                        addend=descriptor.offset,
                        dims=descriptor.dims,
                        strides=descriptor.strides,
                        box=descriptor.box,
                        element_strides=descriptor.element_strides,
                        **descriptor.numbers,
                    )
                )
                data[at : at + 128] = bytes(128)
                at = raw.find(descriptor.token, at + 128)
        pointers = []
        for offset in range(0, len(data) - 7, 8):
            word = int.from_bytes(data[offset : offset + 8], "little")
            place = self.locate(word, slack=1) if FIRST_ADDRESS <= word < LAST_ADDRESS else None
            if place:
                pointers.append(Pointer(offset, *place))
                data[offset : offset + 8] = bytes(8)
        return Param(bytes(data), tuple(pointers), tuple(maps))

    # -- end ------------------------------------------------------------------------------------------------------

    def plan(
        self, outputs: list[torch.Tensor], tree: OutputTree, toolchain: dict[str, str], source_sha256: str
    ) -> LaunchPlan:
        """The plan of the current call, without the buffers and uploads that nothing uses."""
        views = [self.view(tensor) for tensor in outputs]
        inputs = {i for i, region in enumerate(self.regions) if region.input is not None and region.call == self.call}
        used = {view.buffer for view in views} | inputs
        steps: list[Step] = []
        for step in reversed(self.steps):
            if isinstance(step, Upload) and step.target.buffer not in used:
                continue
            steps.append(step)
            used |= buffers_of(step)
        uploaded = {step.target.buffer for step in steps if isinstance(step, Upload)}
        steps += [self._constant(i) for i in sorted(used - inputs - uploaded) if self.regions[i].readable]
        modules = sorted({step.image for step in steps if isinstance(step, Launch)})
        order = {old: new for new, old in enumerate(sorted(used))}
        return LaunchPlan(
            version=1,
            dsl=self.dsl,
            target=ARCH,
            buffers=tuple(Buffer(self.regions[i].nbytes, self.regions[i].input) for i in sorted(used)),
            images=tuple(self._image(module) for module in modules),
            steps=tuple(renumber(step, order, modules) for step in reversed(steps)),
            outputs=tuple(_moved(view, order) for view in views),
            output_tree=tree,
            toolchain=toolchain,
            source_sha256=source_sha256,
        )

    def _constant(self, buffer: int) -> Upload:
        """The upload of a constant that an earlier call made and this one still uses."""
        region = self.regions[buffer]
        view = TensorView(buffer, 0, (region.nbytes,), (1,), "uint8")
        return Upload(view, ctypes.string_at(region.address, region.nbytes))

    def _image(self, module: int) -> Image:
        compiled = self.compiled[module]
        return Image(compiled.ptx, compiled.cubin, cubin_registers(compiled.cubin))


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``. Raises HostRefusal for dtypes a plan cannot hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise HostRefusal(f"tensors of dtype {name} are not supported")
    return name


def buffers_of(step: Step) -> set[int]:
    """Numbers of the buffers that a step touches."""
    if isinstance(step, Launch):
        pointers = {pointer.buffer for param in step.params for pointer in param.pointers}
        return pointers | {tensor_map.buffer for param in step.params for tensor_map in param.tensor_maps}
    return {step.target.buffer} | ({step.source.buffer} if isinstance(step, Copy) else set())


def _moved(place: Any, order: dict[int, int]) -> Any:
    return replace(place, buffer=order[place.buffer])


def renumber(step: Step, order: dict[int, int], modules: list[int]) -> Step:
    """The step with its buffers renumbered by ``order``, and its image by its place in ``modules``."""
    if isinstance(step, Launch):
        params = tuple(
            Param(p.data, tuple(_moved(x, order) for x in p.pointers), tuple(_moved(x, order) for x in p.tensor_maps))
            for p in step.params
        )
        return replace(step, image=modules.index(step.image), params=params)
    moved: Fill | Upload | Copy = replace(step, target=_moved(step.target, order))
    return replace(moved, source=_moved(moved.source, order)) if isinstance(moved, Copy) else moved
