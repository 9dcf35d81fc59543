"""Tensors that claim to live on the target device: shapes, dtypes and addresses, without data.

A :class:`RecordedTensor` is a CPU tensor over a tape's reserved memory that answers ``cuda:0``. Two modes surround the
submission's code: :class:`DeviceMode` (a torch function mode) sees calls as they were written, with their ``device``
arguments and Python-only methods; :class:`TapeMode` (a dispatch mode) sees the operators they become. Allocation,
views, fills, copies and casts are written to the tape; everything else that would compute is refused by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from mkb_env.plan import Copy, Fill, Upload
from mkb_env.recorder.dispatch import QuickDispatchMode
from mkb_env.recorder.tape import HostRefusal, Tape

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
DLPACK_CUDA = 2

VIEW_OPS = {
    "view", "_unsafe_view", "view_as", "reshape", "_reshape_alias", "permute", "transpose", "t", "slice", "select",
    "narrow", "expand", "as_strided", "unsqueeze", "squeeze", "detach", "alias", "lift_fresh", "split",
    "split_with_sizes", "unbind", "diagonal", "unfold", "view_as_real", "view_as_complex",
}  # fmt: skip
FACTORIES = {"empty_strided", "new_empty_strided"} | {
    form for name in ("empty", "zeros", "ones", "full") for form in (name, f"{name}_like", f"new_{name}")
}
CONSTANTS = {"tensor", "as_tensor", "asarray", "arange", "linspace", "from_numpy", "scalar_tensor", "eye"}
READS = {
    "tolist", "numpy", "cpu", "item", "__array__", "__repr__", "__str__", "__format__", "__bool__", "__int__",
    "__float__", "__index__",
}  # fmt: skip
NO_DATA = (
    "tensors have shapes and addresses here but no data",
    "the host code runs as under CUDA-graph capture: only shapes, dtypes, scalars and the geometry tensors named in "
    "the task have values",
)


class RecordedTensor(torch.Tensor):
    """A tensor of the target device, as the submission's host code sees it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Always ``cuda:0``."""
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Always True."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """Always False."""
        return False

    def get_device(self) -> int:
        """Always 0."""
        return 0

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]
        return (DLPACK_CUDA, 0)

    def __dlpack__(self, **_: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return cuda_capsule(self.as_subclass(torch.Tensor))


def cuda_capsule(tensor: torch.Tensor) -> Any:
    """A DLPack capsule of a CPU tensor that says CUDA device 0 (the first field after the data pointer)."""
    capsule = torch.Tensor.__dlpack__(tensor.detach())
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = pointer(capsule, b"dltensor")
    ctypes.cast(at + 8, ctypes.POINTER(ctypes.c_int))[0] = DLPACK_CUDA
    return capsule


class Recorder:
    """Makes tensors over a tape's memory and writes memory operations to it."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def over(self, buffer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> RecordedTensor:
        """A recorded tensor over one of the tape's buffers, from its first byte."""
        region = self.tape.regions[buffer]
        with torch._C.DisableTorchFunction():
            raw = (ctypes.c_char * max(region.nbytes, 1)).from_address(region.address)
            flat = torch.frombuffer(raw, dtype=torch.uint8, count=max(region.nbytes, 1))
            size = torch.empty(0, dtype=dtype).element_size()
            typed = flat[: region.nbytes // size * size].view(dtype) if region.nbytes >= size else flat[:0].view(dtype)
            return typed.as_strided(shape, strides).as_subclass(RecordedTensor)

    def allocate(self, like: torch.Tensor, data: bytes | None = None) -> RecordedTensor:
        """A new tensor with the shape, strides and dtype of ``like`` (usually on ``meta``)."""
        extent = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1 if like.numel() else 0
        buffer = self.tape.allocate(extent * like.element_size(), data=data)
        return self.over(buffer, tuple(like.shape), tuple(like.stride()), like.dtype)

    def upload(self, constant: torch.Tensor) -> RecordedTensor:
        """A new tensor whose values are known while recording."""
        constant = constant.detach().contiguous()
        data = bytes_of(constant)
        made = self.allocate(constant, data)
        if constant.numel():
            self.tape.add(Upload(self.tape.view(made), data))
        return made

    def fill(self, target: torch.Tensor, value: bool | int | float) -> None:
        """Write ``target.fill_(value)`` to the tape. Raises torch's own error for a value the dtype cannot hold."""
        torch.empty(1, dtype=target.dtype).fill_(value)
        if target.numel():
            self.tape.add(Fill(self.tape.view(target), value))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write ``target.copy_(source)`` to the tape; ``source`` may be a CPU constant."""
        if not self.is_recorded(source):
            source = self.upload(source)
        if not target.numel():
            return
        with torch._C.DisableTorchFunction():
            source = source.expand(target.shape)
        self.tape.add(Copy(self.tape.view(target), self.tape.view(source)))

    def is_recorded(self, value: Any) -> bool:
        """Whether ``value`` is a tensor over this tape's memory."""
        if not isinstance(value, torch.Tensor):
            return False
        if isinstance(value, RecordedTensor):
            return True
        return value.device.type == "cpu" and value.layout == torch.strided and self._at(value) is not None

    def is_readable(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values are known while recording."""
        place = self._at(tensor)
        return place is not None and self.tape.regions[place[0]].readable

    def _at(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        with torch._C.DisableTorchFunction():
            return self.tape.locate(tensor.untyped_storage().data_ptr(), slack=1)

    def values(self, tensor: torch.Tensor, doing: str) -> torch.Tensor:
        """A plain CPU copy of a tensor's values. Raises HostRefusal where it has none."""
        if not self.is_readable(tensor):
            raise HostRefusal(f"{doing} reads tensor data on the host: {NO_DATA[0]}", NO_DATA[1])
        with torch._C.DisableTorchFunction():
            plain = tensor.as_subclass(torch.Tensor)
            return torch.empty_strided(plain.shape, plain.contiguous().stride(), dtype=plain.dtype).copy_(plain)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class DeviceMode(TorchFunctionMode):
    """Answers calls that name the target device or that would read a recorded tensor's data."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        recorded = isinstance(first, torch.Tensor) and self.recorder.is_recorded(first)
        if name in FACTORIES and (is_cuda(kwargs.get("device")) or (recorded and kwargs.get("device") is None)):
            return self._factory(func, name, args, kwargs)
        if name in CONSTANTS and not recorded and is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
            return self.recorder.upload(func(*args, **kwargs))
        if name in ("as_tensor", "asarray") and recorded:
            name = "to"
        if name in ("to", "cuda", "cpu", "type") and isinstance(first, torch.Tensor):
            return self._move(name, first, args[1:], kwargs)
        if recorded and name in ("__repr__", "__str__", "__format__") and not self.recorder.is_readable(first):
            return f"tensor(..., size={tuple(first.shape)}, dtype={first.dtype}, device='{CUDA}')"
        if recorded and name in READS:
            return getattr(self.recorder.values(first, f"Tensor.{name}"), name)(*args[1:], **kwargs)
        if recorded and name in ("pin_memory", "share_memory_", "set_", "resize_", "untyped_storage", "storage"):
            raise HostRefusal(f"Tensor.{name} is not available while recording")
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
            return self._on_device(func(*args, **kwargs))
        if recorded and name == "contiguous" and first.is_contiguous():
            return first
        return func(*args, **kwargs)

    def _factory(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> RecordedTensor:
        kwargs["device"] = "meta"
        kwargs.pop("pin_memory", None)
        value = fill_value(name, args, kwargs)
        with torch._C.DisableTorchFunction():
            stand_in = tree_map_only(torch.Tensor, meta_of, args)
            made = self.recorder.allocate(func(*stand_in, **kwargs))
        if value is not None:
            self.recorder.fill(made, value)
        return made

    def _move(self, name: str, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
        """``Tensor.to`` and its short forms, with the devices taken out of the arguments."""
        device = {"cuda": CUDA, "cpu": CPU}.get(name) or kwargs.pop("device", None)
        rest = []
        for arg in args if name != "cuda" else ():
            if isinstance(arg, torch.Tensor):
                device, arg = arg.device, arg.dtype
            if isinstance(arg, torch.device | str) and name == "to":
                device = torch.device(arg)
            else:
                rest.append(arg)
        recorded = self.recorder.is_recorded(tensor)
        target = torch.device(device).type if device is not None else ("cuda" if recorded else "cpu")
        if target not in ("cuda", "cpu"):
            raise HostRefusal(f"tensors live on the target device or the CPU here, not on {target}")
        kwargs.pop("non_blocking", None)
        if recorded and target == "cpu":
            tensor, recorded = self.recorder.values(tensor, f"Tensor.{name}"), False
        if rest or kwargs:
            tensor = (
                torch.Tensor.to(tensor, *rest, **kwargs)
                if name != "type"
                else torch.Tensor.type(tensor, *rest, **kwargs)
            )
        if target == "cuda" and not recorded:
            return self.recorder.upload(tensor)
        return tensor

    def _on_device(self, result: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda t: t if self.recorder.is_recorded(t) else self.recorder.upload(t), result
        )


class TapeMode(QuickDispatchMode):
    """Writes memory operators on recorded tensors to the tape and refuses the others."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[-1]
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        recorded = [self.recorder.is_recorded(leaf) for leaf in leaves]
        if not any(recorded):
            return self._plain(func, name, leaves, args, kwargs)
        if func.is_view or name in VIEW_OPS:
            return self._adopt(func(*args, **kwargs))
        handler = getattr(self, f"_{name.strip('_')}", None) if name in MEMORY_OPS else None
        if handler:
            return handler(*args, **kwargs)
        if all(self.recorder.is_readable(leaf) if yes else True for leaf, yes in zip(leaves, recorded, strict=True)):
            return self._on_known_values(func, name, args, kwargs)
        if name == "_local_scalar_dense":
            raise HostRefusal(f"reading a tensor's value on the host: {NO_DATA[0]}", NO_DATA[1])
        raise refused(func)

    def _adopt(self, result: Any) -> Any:
        """Results over recorded memory are recorded tensors."""
        with torch._C.DisableTorchFunction():
            return tree_map_only(
                torch.Tensor, lambda t: t.as_subclass(RecordedTensor) if self.recorder.is_recorded(t) else t, result
            )

    def _plain(self, func: Any, name: str, leaves: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """CPU tensors: data movement and integer arithmetic (schedules) are the host's business, other maths is not."""
        if not leaves or all(leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        if name in COMPUTES_NOTHING or name in FACTORIES or func.is_view or name in VIEW_OPS:
            return func(*args, **kwargs)
        if any(leaf.is_floating_point() or leaf.is_complex() for leaf in leaves):
            raise refused(func)
        return func(*args, **kwargs)

    def _on_known_values(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Integer arithmetic over the workload's geometry: computed now; the result is a constant of the plan."""
        plain_args, plain_kwargs = tree_map_only(torch.Tensor, self._known, (args, kwargs))
        if any(
            t.is_floating_point() for t in tree_flatten((plain_args, plain_kwargs))[0] if isinstance(t, torch.Tensor)
        ):
            raise refused(func)
        if name.endswith("_") and not name.startswith("_"):
            raise HostRefusal(f"torch operator {name} changes a geometry tensor in place; make a new tensor instead")
        result = func(*plain_args, **plain_kwargs)
        return tree_map_only(torch.Tensor, self.recorder.upload, result)

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.recorder.values(tensor, "computing") if self.recorder.is_recorded(tensor) else tensor

    # -- memory operators -----------------------------------------------------------------------------------------

    def _to_copy(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made = self.recorder.allocate(
            meta_of(tensor).to(kwargs.get("dtype") or tensor.dtype, memory_format=_format(kwargs))
        )
        self.recorder.copy(made, tensor)
        return made

    def _clone(self, tensor: torch.Tensor, *, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        made = self.recorder.allocate(torch.clone(meta_of(tensor), memory_format=memory_format))
        self.recorder.copy(made, tensor)
        return made

    def _contiguous(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self._clone(tensor, memory_format=torch.contiguous_format)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not self.recorder.is_recorded(target):
            source = self.recorder.values(source, "Tensor.copy_ to a CPU tensor")
            return target.copy_(source)
        self.recorder.copy(target, source)
        return target

    def _fill(self, target: torch.Tensor, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            value = self._known(value).item()
        self.recorder.fill(target, value)
        return target

    def _zero(self, target: torch.Tensor) -> torch.Tensor:
        return self._fill(target, 0)

    def _cat(self, tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        made = self.recorder.allocate(torch.cat([meta_of(t) for t in tensors], dim))
        at = 0
        for tensor in tensors:
            if tensor.numel():
                with torch._C.DisableTorchFunction():
                    part = made.narrow(dim, at, tensor.shape[dim])
                self.recorder.copy(part, tensor)
                at += tensor.shape[dim]
        return made


MEMORY_OPS = {"_to_copy", "clone", "contiguous", "copy_", "fill_", "zero_", "cat"}
COMPUTES_NOTHING = MEMORY_OPS | {"stack", "_local_scalar_dense", "item", "index", "repeat", "set_", "resize_"}


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Surround the submission's code with both modes."""
    with TapeMode(recorder), DeviceMode(recorder):
        yield


def refused(func: Any) -> HostRefusal:
    """The refusal of an operator that computes."""
    return HostRefusal(
        f"torch operator {func} computes on tensor data",
        "torch may only allocate, fill, view, reshape, copy and cast here; do the arithmetic in a kernel",
    )


def is_cuda(device: Any) -> bool:
    """Whether a ``device`` argument names the target device."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return device is not None and torch.device(device).type == "cuda"


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype on ``meta``."""
    return torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device="meta")


def fill_value(name: str, args: Any, kwargs: dict[str, Any]) -> bool | int | float | None:
    """The value a factory writes, or None for the ``empty`` ones."""
    if "zeros" in name:
        return 0
    if "ones" in name:
        return 1
    if "full" in name:
        value = kwargs["fill_value"] if "fill_value" in kwargs else args[2 if name == "new_full" else 1]
        return value.item() if isinstance(value, torch.Tensor) else value
    return None


def _format(kwargs: dict[str, Any]) -> torch.memory_format:
    return kwargs.get("memory_format") or torch.preserve_format
