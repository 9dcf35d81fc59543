"""Python-level answers as the target device: ``torch.cuda`` and ``cuda.bindings`` without a driver."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mkb_env.recorder import target
from mkb_env.recorder.tape import HostRefusal

DEVICE_PROPERTIES = {
    "name": target.NAME,
    "major": target.CAPABILITY[0],
    "minor": target.CAPABILITY[1],
    "total_memory": target.MEMORY_BYTES,
    "multi_processor_count": target.SM_COUNT,
    "L2_cache_size": target.L2_BYTES,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": target.SHARED_OPTIN_BYTES,
    "shared_memory_per_multiprocessor": target.SHARED_PER_SM_BYTES,
    "warp_size": 32,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "clock_rate": 1980000,
    "memory_clock_rate": 3201000,
    "memory_bus_width": 6016,
}


class Stream:
    """A stream; launches are recorded in the order they are issued, whatever their stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.device = torch.device("cuda", 0)
        self.priority = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Order is kept anyway."""

    def wait_event(self, event: Any) -> None:
        """Order is kept anyway."""

    def record_event(self, event: Any = None) -> Any:
        """A recorded event."""
        return event or Event()

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """An event; it cannot tell time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        """Nothing to do."""

    def wait(self, stream: Any = None) -> None:
        """Order is kept anyway."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Refused."""
        raise HostRefusal(
            "torch.cuda.Event.elapsed_time: there is no clock while recording; the judge times the kernels"
        )


def install_torch_cuda() -> None:
    """Make ``torch.cuda`` answer as the target device."""
    properties = types.SimpleNamespace(**DEVICE_PROPERTIES)
    stream = Stream()

    @contextlib.contextmanager
    def enter(*_: Any, **__: Any) -> Iterator[None]:
        yield

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: target.NAME,
        "get_device_capability": lambda device=None: target.CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [target.ARCH],
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda device=None: (target.MEMORY_BYTES, target.MEMORY_BYTES),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "device": enter,
        "device_of": enter,
        "stream": enter,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "CUDAGraph": refuser("torch.cuda.CUDAGraph"),
        "graph": refuser("torch.cuda.graph"),
        "make_graphed_callables": refuser("torch.cuda.make_graphed_callables"),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.compile = refuser("torch.compile")
    torch.version.cuda = "13.0"


def refuser(name: str) -> Callable[..., Any]:
    """A function that refuses to be called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise HostRefusal(f"{name} is not available: the host code is recorded, as under CUDA-graph capture")

    refuse.__name__ = name.rsplit(".", 1)[-1]
    return refuse


def install_cuda_bindings() -> None:
    """Make ``cuda.bindings.driver`` and ``.runtime`` answer as the target device; other calls are refused by name."""
    from cuda.bindings import driver, runtime

    _install(driver, _driver_answers(driver), "cu", "cuda.bindings.driver")
    _install(runtime, _runtime_answers(runtime), "cuda", "cuda.bindings.runtime")


def _install(module: Any, answers: dict[str, Callable[..., Any]], prefix: str, title: str) -> None:
    for name in dir(module):
        if name in answers:
            setattr(module, name, answers[name])
        elif (
            name.startswith(prefix)
            and name[len(prefix) :][:1].isupper()
            and not isinstance(getattr(module, name), type)
        ):
            setattr(module, name, refuser(f"{title}.{name}"))


def _attribute(which: Any) -> int:
    number = int(which)
    if number not in target.ATTRIBUTES:
        raise HostRefusal(f"device attribute {which} is not known while recording")
    return target.ATTRIBUTES[number]


def _driver_answers(driver: Any) -> dict[str, Callable[..., Any]]:
    ok = driver.CUresult.CUDA_SUCCESS

    def done(*_: Any) -> tuple[Any]:
        return (ok,)

    def clusters(kernel: Any, config: Any) -> tuple[Any, int]:
        value = config.attrs[0].value.clusterDim
        return ok, target.max_active_clusters(value.x * value.y * value.z)

    return {
        "cuInit": done,
        "cuDriverGetVersion": lambda: (ok, target.DRIVER_VERSION),
        "cuDeviceGetCount": lambda: (ok, 1),
        "cuDeviceGet": lambda ordinal: (ok, driver.CUdevice(0)),
        "cuDeviceGetName": lambda length, device: (ok, target.NAME.encode()),
        "cuDeviceGetAttribute": lambda which, device: (ok, _attribute(which)),
        "cuDeviceTotalMem": lambda device: (ok, target.MEMORY_BYTES),
        "cuCtxGetCurrent": lambda: (ok, driver.CUcontext(1)),
        "cuCtxGetDevice": lambda: (ok, driver.CUdevice(0)),
        "cuCtxSetCurrent": done,
        "cuCtxSynchronize": done,
        "cuDevicePrimaryCtxRetain": lambda device: (ok, driver.CUcontext(1)),
        "cuStreamSynchronize": done,
        "cuGetErrorName": lambda error: (ok, str(error).encode()),
        "cuGetErrorString": lambda error: (ok, str(error).encode()),
        "cuLibraryLoadData": lambda *_: (ok, driver.CUlibrary(1)),
        "cuLibraryEnumerateKernels": lambda count, library: (ok, [driver.CUkernel(1)] * count),
        "cuLibraryUnload": done,
        "cuKernelGetFunction": lambda kernel: (ok, driver.CUfunction(1)),
        "cuFuncSetAttribute": done,
        "cuKernelSetAttribute": done,
        "cuOccupancyAvailableDynamicSMemPerBlock": lambda *_: (ok, target.SHARED_OPTIN_BYTES),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda *_: (ok, 1),
        "cuOccupancyMaxActiveClusters": clusters,
    }


def _runtime_answers(runtime: Any) -> dict[str, Callable[..., Any]]:
    ok = runtime.cudaError_t.cudaSuccess

    def done(*_: Any) -> tuple[Any]:
        return (ok,)

    return {
        "cudaGetDeviceCount": lambda: (ok, 1),
        "cudaGetDevice": lambda: (ok, 0),
        "cudaSetDevice": done,
        "cudaFree": done,
        "cudaDeviceGetAttribute": lambda which, device: (ok, _attribute(which)),
        "cudaDeviceSynchronize": done,
        "cudaStreamSynchronize": done,
        "cudaDriverGetVersion": lambda: (ok, target.DRIVER_VERSION),
        "cudaRuntimeGetVersion": lambda: (ok, target.DRIVER_VERSION),
        "cudaGetLastError": done,
        "cudaPeekAtLastError": done,
        "cudaGetErrorName": lambda error: (ok, str(error).encode()),
        "cudaGetErrorString": lambda error: (ok, str(error).encode()),
    }
