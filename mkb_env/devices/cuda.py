"""A real GPU: runs plans through the driver API, with torch for buffers and streams.

torch is imported when a :class:`CudaDevice` is made, not with this module.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkb_env.devices import cuda_driver
from mkb_env.devices.base import POISON_BYTE, DeviceFault, KernelInfo, short_name
from mkb_env.devices.cuda_launch import KernelLaunch, PreparedLaunch
from mkb_env.plan import DTYPE_BYTES, Copy, Fill, Launch, LaunchPlan, TensorView, Upload

if TYPE_CHECKING:
    import torch

_INFRA_CODES = frozenset({3, 4, 46, 100, 101, 201, 214, 220, 226, 709, 802, 803, 804, 999})
"""CUresults that speak of the device or the driver, not of the kernel: shut down, absent, ECC, NVLink, unknown."""
_CAPTURE_CODES = range(900, 909)
_HINTS = {
    700: "a kernel read or wrote memory outside its buffers",
    702: "a kernel ran longer than the display watchdog allows",
    710: "a device-side assertion failed",
    714: "the call stack overflowed or was corrupted",
    715: "the kernel reached a trap or an instruction this device lacks",
    716: "a load, store or bulk copy was not aligned to its size",
    717: "an address does not belong to the state space that the instruction names",
    718: "the program counter left the kernel, for example by a corrupted call",
    719: "for example an out-of-range shared-memory access or a misuse of an mbarrier",
}
_PROBE = """
import ctypes, runpy, sys
try:
    library = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(print(f"no CUDA driver: {error}"))
code, count = library.cuInit(0), ctypes.c_int()
if code:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    sys.exit(print(f"the CUDA driver cannot be initialised: {(text.value or b'unknown error').decode()}"))
library.cuDeviceGetCount(ctypes.byref(count))
if not count.value:
    sys.exit(print("the CUDA driver sees no device"))
if int(sys.argv[2]) >= count.value:
    sys.exit(print(f"the CUDA driver sees {count.value} device(s), numbered from 0"))
if not runpy.run_path(sys.argv[1]).get("cuda"):
    sys.exit(print("this build of torch has no CUDA support"))
"""


def available(ordinal: int = 0) -> str | None:
    """None if CUDA device number ``ordinal`` can be used, else one sentence that says why not.

    The driver is asked in a short-lived process: the caller stays without CUDA state and may still fork.
    """
    try:
        version_file = str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))
        probe = [sys.executable, "-I", "-S", "-c", _PROBE, version_file, str(ordinal)]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    except subprocess.TimeoutExpired:
        return "the CUDA driver did not answer within 60 seconds"
    if done.stdout.strip():
        return done.stdout.strip()
    return None if done.returncode == 0 else f"the CUDA driver crashed when asked for its devices: {done.stderr[-300:]}"


def require(device: str) -> None:
    """Refuse ``cuda`` and ``cuda:N`` where there is no such GPU; any other name of a device is let by.

    Raises:
        ValueError: in one sentence that says why the GPU cannot be used.
    """
    kind, _, ordinal = device.partition(":")
    if kind == "cuda" and (reason := available(int(ordinal or 0))):
        raise ValueError(f'device "{device}" cannot be used: {reason}; use --device simulator (device="simulator")')


class CudaDevice:
    """One GPU of this process. Making one creates torch's context and makes the device current.

    ``broken`` becomes True when device code destroyed the context (illegal access and the like): nothing can run in
    this process any more, it must be replaced.

    Raises:
        DeviceFault: ``infra_error`` if the device or its driver cannot be used.
    """

    simulated = False

    def __init__(self, ordinal: int = 0) -> None:
        import torch

        if not torch.cuda.is_available():
            reason = available() or "torch sees no device"
            raise DeviceFault("infra_error", f"CUDA device {ordinal} cannot be used: {reason}")
        self.broken = False
        self._lost = ""
        self._launched: tuple[str, ...] = ()
        try:
            torch.cuda.set_device(ordinal)
            torch.zeros(1, device="cuda")
            self.driver = cuda_driver.driver()
            self._context = self.driver.primary_context(ordinal)
            self.shared_limit = self.driver.device_attribute(cuda_driver.DEVICE_SHARED_OPTIN, ordinal)
        except (RuntimeError, OSError, cuda_driver.CudaError) as error:
            raise DeviceFault("infra_error", f"CUDA device {ordinal} cannot be used: {error}") from None
        self.ordinal = ordinal
        self.torch_device = torch.device("cuda", ordinal)
        properties = torch.cuda.get_device_properties(ordinal)
        self.name: str = properties.name
        self.l2_bytes: int = properties.L2_cache_size
        self.memory_bytes: int = properties.total_memory
        self.multiprocessors: int = properties.multi_processor_count
        self.compute_capability: tuple[int, int] = (properties.major, properties.minor)

    def versions(self) -> dict[str, str]:
        """What a measurement on this device depends on."""
        import torch

        kernel_driver = Path("/proc/driver/nvidia/version")
        text = kernel_driver.read_text() if kernel_driver.exists() else ""
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
        return {
            "device": self.name,
            "compute_capability": "{}.{}".format(*self.compute_capability),
            "driver": found.group() if found else "unknown",
            "cuda_driver": self.driver.version(),
            "torch": str(torch.__version__),
            "cuda_torch": str(torch.version.cuda),
        }

    def load(self, plan: LaunchPlan) -> LoadedCudaPlan:
        """Load the plan's images and check each launch against what the device can do.

        Raises:
            DeviceFault: ``launch_error`` for an image, kernel, parameter list or launch that does not fit the device;
                ``unsupported`` for PTX newer than the driver.
        """
        with self.faults():
            self.make_current()
            return LoadedCudaPlan(self, plan)

    def make_current(self) -> None:
        """Make the device's context the calling thread's. Raises DeviceFault if the context is lost."""
        if self.broken:
            raise DeviceFault("infra_error", f"the CUDA context was lost earlier ({self._lost}); restart the process")
        self.driver.set_current(self._context)

    def synchronize(self) -> None:
        """Wait for enqueued work. Raises DeviceFault for faults of the device code."""
        with self.faults():
            self.make_current()
            self.driver.synchronize()

    def reset_persisting_l2(self) -> None:
        """Make every persisting line of the L2 cache an ordinary one."""
        with self.faults():
            self.make_current()
            self.driver.reset_persisting_l2()

    def note_launched(self, kernels: tuple[str, ...]) -> None:
        """Remember what ran last: a fault arrives later and does not say which kernel caused it."""
        self._launched = kernels

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Turn the driver's and torch's CUDA errors within the block into DeviceFault."""
        import torch

        try:
            yield
        except cuda_driver.CudaError as error:
            raise self._fault(error) from None
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.ordinal)
            message = f"out of device memory ({free >> 20} of {total >> 20} MiB free): {str(error).splitlines()[0]}"
            raise DeviceFault("launch_error", message) from None
        except RuntimeError as error:
            try:
                self.driver.synchronize()
            except cuda_driver.CudaError as lost:
                if lost.code not in _CAPTURE_CODES:
                    raise self._fault(lost) from error
            raise

    def _fault(self, error: cuda_driver.CudaError) -> DeviceFault:
        code = error.code
        if code not in _CAPTURE_CODES:
            try:
                self.driver.synchronize()
            except cuda_driver.CudaError as lost:
                # The first report of an asynchronous fault may come from an unrelated call: name the fault itself.
                self.broken = lost.code not in _CAPTURE_CODES
                code, error = (lost.code, lost) if self.broken else (code, error)
        message = f"{error.name}: {error.text}"
        message += f" ({_HINTS[code]})" if code in _HINTS else f", from {error.call}"
        if self.broken:
            self._lost = message
        kernels = self._launched if self.broken else ()
        if kernels:
            shown = ", ".join(short_name(name) for name in kernels[:8])
            message += f"; the plan had launched {shown}" + (
                f" and {len(kernels) - 8} more" if len(kernels) > 8 else ""
            )
        if error.log:
            message += f"\n{error.log}"
        if code in _INFRA_CODES:
            return DeviceFault("infra_error", message)
        kernel = kernels[0] if len(kernels) == 1 else ""
        return DeviceFault("timeout" if code == cuda_driver.LAUNCH_TIMEOUT else "launch_error", message, kernel)


class LoadedCudaPlan:
    """A plan whose modules are loaded. Close it only after CUDA graphs that captured it are gone."""

    def __init__(self, device: CudaDevice, plan: LaunchPlan) -> None:
        import torch

        self.device, self.plan = device, plan
        self.closed = False
        self._modules: list[int] = []
        try:
            self._modules += [_load_image(device, plan, number) for number in range(len(plan.images))]
            self.launches = {
                number: KernelLaunch(device, self._modules[step.image], step)
                for number, step in enumerate(plan.steps)
                if isinstance(step, Launch)
            }
            # A function has one limit for all its launches, so the largest wins, whatever their order.
            for launch in sorted(self.launches.values(), key=lambda launch: launch.step.shared_bytes):
                launch.prepare_function()
            for launch in self.launches.values():
                launch.check_residency()
        except BaseException:
            self.close()
            raise
        self.kernels: tuple[KernelInfo, ...] = tuple(launch.info for launch in self.launches.values())
        self.kernel_names = tuple(dict.fromkeys(kernel.name for kernel in self.kernels))
        self.constants: dict[int, torch.Tensor] = {
            number: torch.frombuffer(bytearray(step.data), dtype=torch.uint8).to(device.torch_device)
            for number, step in enumerate(plan.steps)
            if isinstance(step, Upload) and step.data
        }

    def bind(self, inputs: Sequence[torch.Tensor | bool | int | float]) -> BoundCudaPlan:
        """Tie the plan to ``inputs``, ``solve``'s arguments in order.

        Raises:
            ValueError: if an input is not a contiguous tensor of this device with the size the plan states.
            DeviceFault: ``launch_error`` if the workspaces do not fit in memory or a tensor map cannot be encoded.
        """
        if self.closed:
            raise ValueError("this plan was closed; load it again")
        with self.device.faults():
            self.device.make_current()
            return BoundCudaPlan(self, inputs)

    def estimate_us(self) -> float | None:
        """None: a real device is timed, not estimated."""
        return None

    def close(self) -> None:
        """Unload the images."""
        self.closed = True
        while self._modules:
            module = self._modules.pop()
            # Without its context a module is gone already.
            if not self.device.broken:
                self.device.driver.unload_module(module)


def _load_image(device: CudaDevice, plan: LaunchPlan, number: int) -> int:
    image = plan.images[number]
    if image.cubin:
        try:
            cuda_driver.check_image(image.cubin)
        except ValueError as error:
            raise DeviceFault("launch_error", f"image {number} is damaged: {error}") from None
    try:
        return device.driver.load_module(image.cubin or image.ptx.encode() + b"\0")
    except cuda_driver.CudaError as error:
        have = "sm_{}{}".format(*device.compute_capability)
        if error.code == cuda_driver.UNSUPPORTED_PTX_VERSION or "Unsupported .version" in error.log:
            message = (
                f"image {number} is PTX of a newer version than this driver (CUDA {device.driver.version()}) reads; "
                "record the plan with a cubin, or update the driver"
            )
            raise DeviceFault("unsupported", message) from None
        if error.code in (cuda_driver.NO_BINARY_FOR_GPU, cuda_driver.INVALID_IMAGE, cuda_driver.INVALID_PTX):
            message = (
                f"image {number} was compiled for {plan.target} and does not load on {device.name} ({have}): {error}"
            )
            raise DeviceFault("launch_error", message) from None
        raise


class BoundCudaPlan:
    """A plan tied to real buffers. ``run`` only launches and copies, so it may be captured in a CUDA graph."""

    def __init__(self, loaded: LoadedCudaPlan, inputs: Sequence[Any]) -> None:
        import torch

        self._loaded, self._device = loaded, loaded.device
        plan = loaded.plan
        self._workspaces: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        for buffer in plan.buffers:
            if buffer.input is None:
                # torch's allocator aligns to 512 bytes.
                memory = torch.empty(buffer.nbytes, dtype=torch.uint8, device=self._device.torch_device)
                self._workspaces.append(memory)
            else:
                memory = _input_bytes(inputs, buffer.input, buffer.nbytes, self._device.torch_device)
            self._buffers.append(memory)
        addresses = [memory.data_ptr() for memory in self._buffers]
        launches: list[PreparedLaunch] = []
        self._steps: list[Callable[[], int]] = []
        for number, step in enumerate(plan.steps):
            if isinstance(step, Launch):
                launches.append(loaded.launches[number].prepare(addresses))
                self._steps.append(launches[-1].call)
            else:
                self._steps.append(self._memory_step(number, step))
        self._configs = [launch.config for launch in launches]
        self._keep = launches
        self._stream: int | None = None
        self.outputs: tuple[torch.Tensor, ...] = tuple(_view(self._buffers, view) for view in plan.outputs)

    def poison(self) -> None:
        """Fill every buffer that is not an input with ``POISON_BYTE``, on the current stream."""
        with self._device.faults():
            for memory in self._workspaces:
                memory.fill_(POISON_BYTE)

    def run(self) -> None:
        """Enqueue all steps on torch's current stream.

        Raises:
            DeviceFault: for a launch that the driver refuses, or the fault of an earlier one.
        """
        import torch

        device = self._device
        if self._loaded.closed:
            raise ValueError("this plan was closed; load it again")
        with device.faults():
            device.make_current()
            device.note_launched(self._loaded.kernel_names)
            stream = torch.cuda.current_stream(device.torch_device).cuda_stream
            if stream != self._stream:
                self._stream = stream
                for config in self._configs:
                    config.stream = stream
            for number, step in enumerate(self._steps):
                code = step()
                if code:
                    raise device.driver.error(f"step {number}, launch of {self._name(number)}", code)

    def _name(self, number: int) -> str:
        step = self._loaded.plan.steps[number]
        return step.kernel[:200] if isinstance(step, Launch) else "a memory operation"

    def _memory_step(self, number: int, step: Fill | Copy | Upload) -> Callable[[], int]:
        """The step as a call that returns 0, like a successful launch."""
        where = f"step {number}"
        if not step.target.numel:
            return lambda: 0
        if isinstance(step, Upload):
            source = self._loaded.constants[number]
            begin = step.target.offset
            return partial(_copy, self._buffers[step.target.buffer][begin : begin + len(step.data)], source)
        if isinstance(step, Fill):
            target = _view(self._buffers, step.target, bits=True)
            return partial(_fill, target, _bit_pattern(step.value, step.target.dtype, where))
        # Equal dtypes are copied as bits: torch lacks copies of some narrow formats.
        bits = step.source.dtype == step.target.dtype
        return partial(
            _copy, _view(self._buffers, step.target, bits=bits), _view(self._buffers, step.source, bits=bits)
        )


def _copy(target: torch.Tensor, source: torch.Tensor) -> int:
    target.copy_(source)
    return 0


def _fill(target: torch.Tensor, value: int) -> int:
    target.fill_(value)
    return 0


def _input_bytes(inputs: Sequence[Any], position: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The input's storage as it is given; only its address and its bytes are used."""
    import torch

    if position >= len(inputs):
        raise ValueError(f"the plan reads input {position}, but {len(inputs)} inputs were given")
    tensor = inputs[position]
    where = f"input {position}"
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{where} must be a tensor, got {type(tensor).__name__}")
    if tensor.device != device or not tensor.is_contiguous():
        kind = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise ValueError(f"{where} must be contiguous and on {device}, got a tensor on {tensor.device}, {kind}")
    if tensor.nbytes != nbytes:
        raise ValueError(f"{where} must have {nbytes} bytes as recorded, got {tensor.nbytes} ({tuple(tensor.shape)})")
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device=device)


def _bit_dtype(dtype: str) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[DTYPE_BYTES[dtype]]


def _view(buffers: Sequence[torch.Tensor], view: TensorView, bits: bool = False) -> torch.Tensor:
    """``view`` in its dtype, or with ``bits`` as integers of the same width."""
    import torch

    dtype = _bit_dtype(view.dtype) if bits else getattr(torch, view.dtype)
    memory = buffers[view.buffer][view.offset : view.end].view(dtype)
    return memory.as_strided(view.shape, view.strides)


def _bit_pattern(value: bool | int | float, dtype: str, where: str) -> int:
    """The integer whose bits are ``value`` in ``dtype``, rounded as torch rounds."""
    import torch

    if dtype == "float4_e2m1fn_x2":
        if value != 0:
            raise DeviceFault("unsupported", f"{where}: a float4 tensor can only be filled with 0, got {value}")
        return 0
    try:
        element = torch.full((1,), value, dtype=getattr(torch, dtype))
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise DeviceFault("launch_error", f"{where}: cannot fill {dtype} with {value}: {error}") from None
    return int(element.view(_bit_dtype(dtype)).item())
