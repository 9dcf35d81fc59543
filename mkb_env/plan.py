"""The launch plan: what a submission's host code asked the GPU to do, as data.

A plan is written by a process that ran untrusted code, so it is untrusted data: :func:`decode` accepts nothing that
:func:`validate` has not checked. It holds no absolute address. Every pointer is a pair (buffer, byte offset), patched
into the parameter bytes when a device binds the plan to real buffers.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PLAN_VERSION = 1

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Element size in bytes of every dtype a plan may name (names as in ``str(torch.dtype)`` without ``torch.``)."""

MAGIC = b"MKBPLAN1"
HEADER_BYTES = len(MAGIC) + 32
MAX_PLAN_BYTES = 256 << 20
MAX_STEPS = 4096
MAX_BUFFERS = 4096
MAX_WORKSPACE_BYTES = 64 << 30
MAX_IMAGE_BYTES = 64 << 20
MAX_PARAM_BYTES = 32764  # the driver's own limit on one kernel's parameters
MAX_SHARED_BYTES = 232448  # opt-in dynamic shared memory of one block on Hopper
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)

Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**47)]
Dim3 = tuple[
    Annotated[int, Meta(ge=1, le=2**31 - 1)], Annotated[int, Meta(ge=1, le=65535)], Annotated[int, Meta(ge=1, le=65535)]
]
Dtype = Annotated[str, Meta(max_length=32)]
Name = Annotated[str, Meta(min_length=1, max_length=4096)]


class PlanError(ValueError):
    """A plan that breaks a rule of this module; the message says which and what was found."""


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the plan's records."""


class Buffer(Frozen, frozen=True):
    """One allocation. ``input`` is the position of the tensor in ``solve``'s arguments, or None for a workspace."""

    nbytes: Bytes
    input: Annotated[int, Meta(ge=0, le=255)] | None = None


class TensorView(Frozen, frozen=True):
    """A strided view of a buffer: ``offset`` in bytes, ``strides`` in elements (never negative)."""

    buffer: Index
    offset: Bytes
    shape: tuple[Bytes, ...]
    strides: tuple[Bytes, ...]
    dtype: Dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """First byte after the last element reached, counted from the start of the buffer."""
        if not self.numel:
            return self.offset
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * DTYPE_BYTES[self.dtype]


class Image(Frozen, frozen=True):
    """One GPU module. ``ptx`` feeds the simulator, ``cubin`` (cubin or fatbin) the driver; at least one is present."""

    ptx: str
    cubin: bytes
    registers: dict[str, int] = {}
    """Kernel name -> registers per thread, where the compiler reported it."""


class Pointer(Frozen, frozen=True):
    """Eight bytes at ``offset`` within a parameter hold the address of ``buffer`` plus ``addend`` bytes."""

    offset: Index
    buffer: Index
    addend: Annotated[int, Meta(ge=0, le=2**47)]


class TensorMap(Frozen, frozen=True):
    """Arguments of ``cuTensorMapEncodeTiled``, for a 128-byte descriptor that the device encodes when it binds."""

    offset: Index
    """Byte offset of the descriptor within the parameter."""
    dtype: Annotated[int, Meta(ge=0, le=31)]
    buffer: Index
    addend: Bytes
    dims: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**32)], ...], Meta(min_length=1, max_length=5)]
    strides: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40 - 1)], ...], Meta(max_length=4)]
    box: Annotated[tuple[Annotated[int, Meta(ge=1, le=256)], ...], Meta(min_length=1, max_length=5)]
    element_strides: Annotated[tuple[Annotated[int, Meta(ge=1, le=8)], ...], Meta(min_length=1, max_length=5)]
    interleave: Annotated[int, Meta(ge=0, le=2)]
    swizzle: Annotated[int, Meta(ge=0, le=7)]
    l2_promotion: Annotated[int, Meta(ge=0, le=3)]
    oob_fill: Annotated[int, Meta(ge=0, le=1)]


class Param(Frozen, frozen=True):
    """One kernel parameter: its bytes, with zeros where pointers and descriptors are patched in."""

    data: Annotated[bytes, Meta(max_length=MAX_PARAM_BYTES)]
    pointers: tuple[Pointer, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()


class Launch(Frozen, frozen=True, tag="launch"):
    """One kernel launch; ``shared_bytes`` is dynamic shared memory, ``grid`` and ``cluster`` count blocks."""

    image: Index
    kernel: Name
    grid: Dim3
    block: Dim3
    params: Annotated[tuple[Param, ...], Meta(max_length=1024)]
    cluster: Dim3 = (1, 1, 1)
    shared_bytes: Annotated[int, Meta(ge=0, le=MAX_SHARED_BYTES)] = 0
    cooperative: bool = False
    programmatic: bool = False
    """Programmatic dependent launch: may start before the previous kernel has ended."""


class Fill(Frozen, frozen=True, tag="fill"):
    """Set every element of ``target`` to ``value`` (converted to its dtype)."""

    target: TensorView
    value: bool | int | float


class Copy(Frozen, frozen=True, tag="copy"):
    """Copy ``source`` to ``target`` element by element, casting (round to nearest even) where dtypes differ."""

    target: TensorView
    source: TensorView


class Upload(Frozen, frozen=True, tag="upload"):
    """Write constant bytes, known while recording, into ``target`` (contiguous)."""

    target: TensorView
    data: bytes


Step = Launch | Fill | Copy | Upload


class OutputTree(Frozen, frozen=True):
    """Structure of ``solve``'s return value: ``tensor`` leaves count the plan's ``outputs`` in order."""

    kind: Literal["tensor", "tuple", "list"]
    children: tuple[OutputTree, ...] = ()

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "tensor" else sum(child.leaves for child in self.children)


class LaunchPlan(Frozen, frozen=True):
    """Everything one call of ``solve`` asked for, in order."""

    version: Literal[1]
    dsl: Annotated[str, Meta(max_length=32)]
    target: Annotated[str, Meta(pattern=r"^sm_[0-9]{2,3}[a-z]?$")]
    """Compile target of the images, for example ``sm_90a``."""
    buffers: Annotated[tuple[Buffer, ...], Meta(max_length=MAX_BUFFERS)]
    images: Annotated[tuple[Image, ...], Meta(max_length=256)]
    steps: Annotated[tuple[Step, ...], Meta(max_length=MAX_STEPS)]
    outputs: Annotated[tuple[TensorView, ...], Meta(max_length=256)]
    output_tree: OutputTree
    toolchain: dict[str, str] = {}
    source_sha256: str = ""
    problem: str = ""
    """What it was recorded for: slug, workload and number of the shape; filled in by the judge, not by the recorder."""
    workload: str = ""
    shape: Index = 0

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    def digest(self) -> str:
        """SHA-256 of the encoded plan, in hex."""
        return hashlib.sha256(encode(self)).hexdigest()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LaunchPlan)


def encode(plan: LaunchPlan) -> bytes:
    """The plan as bytes, to be read by :func:`decode`: a magic word, a checksum against damage, and msgpack."""
    return seal(_encoder.encode(plan))


def seal(body: bytes) -> bytes:
    """Put the magic word and the checksum before a plan's msgpack."""
    return MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes) -> LaunchPlan:
    """Read and validate a plan.

    Raises:
        PlanError: if the bytes are not a plan of this version or break one of the rules of :func:`validate`.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise PlanError(f"a plan holds at most {MAX_PLAN_BYTES} bytes, got {len(data)}")
    body = data[HEADER_BYTES:]
    if data[: len(MAGIC)] != MAGIC:
        raise PlanError("not a launch plan: the file does not begin as one; make one with `mkb record`")
    if hashlib.sha256(body).digest() != data[len(MAGIC) : HEADER_BYTES]:
        raise PlanError("the launch plan is damaged: its checksum does not fit; record it again or copy it once more")
    try:
        plan = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"not a launch plan of version {PLAN_VERSION}: {error}") from None
    validate(plan)
    return plan


def validate(plan: LaunchPlan) -> None:
    """Check every bound that the types do not express.

    Raises:
        PlanError: naming the first thing out of bounds.
    """
    _check_buffers(plan)
    for number, image in enumerate(plan.images):
        if not image.ptx and not image.cubin:
            raise PlanError(f"image {number} holds neither PTX nor a cubin")
        if len(image.ptx) + len(image.cubin) > MAX_IMAGE_BYTES:
            raise PlanError(f"image {number} is larger than {MAX_IMAGE_BYTES} bytes")
    for number, step in enumerate(plan.steps):
        where = f"step {number}"
        if isinstance(step, Launch):
            _check_launch(plan, step, where)
        else:
            _check_memory_step(plan, step, where)
    for number, view in enumerate(plan.outputs):
        _check_view(plan, view, f"output {number}")
    if plan.output_tree.leaves != len(plan.outputs):
        raise PlanError(
            f"the output structure has {plan.output_tree.leaves} tensors, the plan lists {len(plan.outputs)}"
        )


def _check_buffers(plan: LaunchPlan) -> None:
    inputs = [buffer.input for buffer in plan.buffers if buffer.input is not None]
    if len(set(inputs)) != len(inputs):
        raise PlanError("two buffers stand for the same input")
    total = sum(buffer.nbytes for buffer in plan.buffers if buffer.input is None)
    if total > MAX_WORKSPACE_BYTES:
        raise PlanError(f"outputs and workspaces need {total} bytes, at most {MAX_WORKSPACE_BYTES} are allowed")


def _check_view(plan: LaunchPlan, view: TensorView, where: str) -> None:
    if view.dtype not in DTYPE_BYTES:
        raise PlanError(f"{where}: unknown dtype {view.dtype!r}")
    if len(view.shape) != len(view.strides) or len(view.shape) > 32:
        raise PlanError(f"{where}: shape {view.shape} and strides {view.strides} do not fit together")
    if view.buffer >= len(plan.buffers):
        raise PlanError(f"{where}: buffer {view.buffer} does not exist")
    if view.end > plan.buffers[view.buffer].nbytes:
        raise PlanError(
            f"{where}: reaches byte {view.end} of buffer {view.buffer}, which has {plan.buffers[view.buffer].nbytes}"
        )
    if view.offset % DTYPE_BYTES[view.dtype]:
        raise PlanError(f"{where}: offset {view.offset} is not a multiple of the element size of {view.dtype}")


def _check_memory_step(plan: LaunchPlan, step: Fill | Copy | Upload, where: str) -> None:
    _check_view(plan, step.target, f"{where} target")
    if plan.buffers[step.target.buffer].input is not None:
        raise PlanError(f"{where}: writes input {plan.buffers[step.target.buffer].input}; inputs are read-only")
    if isinstance(step, Copy):
        _check_view(plan, step.source, f"{where} source")
        if step.source.shape != step.target.shape:
            raise PlanError(f"{where}: copies shape {step.source.shape} to {step.target.shape}")
    elif isinstance(step, Upload):
        expected = step.target.numel * DTYPE_BYTES[step.target.dtype]
        if len(step.data) != expected:
            raise PlanError(f"{where}: uploads {len(step.data)} bytes to a target of {expected}")
        if not is_contiguous(step.target):
            raise PlanError(f"{where}: the target of an upload must be contiguous")


def is_contiguous(view: TensorView) -> bool:
    """Whether the view's elements lie in row-major order without gaps."""
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return not view.numel
        expected *= size
    return True


def _check_launch(plan: LaunchPlan, launch: Launch, where: str) -> None:
    where = f"{where}, kernel {launch.kernel[:80]}"
    if launch.image >= len(plan.images):
        raise PlanError(f"{where}: image {launch.image} does not exist")
    for name, got, most in (("grid", launch.grid, MAX_GRID), ("block", launch.block, MAX_BLOCK)):
        if any(g > m for g, m in zip(got, most, strict=True)):
            raise PlanError(f"{where}: {name} {got} exceeds the device's limit {most}")
    if math.prod(launch.block) > 1024:
        raise PlanError(
            f"{where}: block {launch.block} has {math.prod(launch.block)} threads, at most 1024 are allowed"
        )
    if math.prod(launch.cluster) > 16 or any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise PlanError(f"{where}: cluster {launch.cluster} must divide grid {launch.grid} and have at most 16 blocks")
    if sum(len(param.data) for param in launch.params) > MAX_PARAM_BYTES:
        raise PlanError(f"{where}: more than {MAX_PARAM_BYTES} bytes of parameters")
    for number, param in enumerate(launch.params):
        for pointer in param.pointers:
            _check_pointer(plan, pointer.buffer, pointer.addend, f"{where}, parameter {number}")
            if pointer.offset + 8 > len(param.data):
                raise PlanError(f"{where}, parameter {number}: a pointer lies outside its {len(param.data)} bytes")
        for tensor_map in param.tensor_maps:
            _check_pointer(plan, tensor_map.buffer, tensor_map.addend, f"{where}, parameter {number}")
            if tensor_map.offset + 128 > len(param.data):
                raise PlanError(f"{where}, parameter {number}: a tensor map lies outside its {len(param.data)} bytes")
            ranks = {
                len(tensor_map.dims),
                len(tensor_map.strides) + 1,
                len(tensor_map.box),
                len(tensor_map.element_strides),
            }
            if len(ranks) != 1:
                raise PlanError(f"{where}, parameter {number}: the tensor map's ranks differ: {sorted(ranks)}")


def _check_pointer(plan: LaunchPlan, buffer: int, addend: int, where: str) -> None:
    if buffer >= len(plan.buffers):
        raise PlanError(f"{where}: buffer {buffer} does not exist")
    if addend > plan.buffers[buffer].nbytes:
        raise PlanError(
            f"{where}: a pointer {addend} bytes into buffer {buffer} of {plan.buffers[buffer].nbytes} bytes"
        )
