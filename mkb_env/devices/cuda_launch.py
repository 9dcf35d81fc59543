"""One kernel launch of a plan: checked against the device once, then given addresses at every bind."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mkb_env.devices import cuda_driver
from mkb_env.devices.base import DeviceFault, KernelInfo
from mkb_env.plan import Launch

if TYPE_CHECKING:
    from mkb_env.devices.cuda import CudaDevice

_ALIGNMENT = 64
"""Of every parameter's storage on the host: descriptors passed as ``__grid_constant__`` ask for it."""
_PORTABLE_CLUSTER = 8


class PreparedLaunch(NamedTuple):
    """A launch that is ready to be enqueued any number of times. ``call`` returns a CUresult."""

    call: Callable[[], int]
    config: cuda_driver.LaunchConfig
    keep: tuple[Any, ...]
    """Host memory that the driver reads during ``call``."""


class KernelLaunch:
    """A launch step with its kernel loaded.

    Raises:
        DeviceFault: ``launch_error`` if the kernel does not exist, its parameters differ from the plan's, or it needs
            more threads or shared memory than the device has.
    """

    def __init__(self, device: CudaDevice, module: int, step: Launch) -> None:
        self.device, self.step = device, step
        driver = device.driver
        try:
            self.function = driver.function(module, step.kernel)
        except cuda_driver.CudaError as error:
            if error.code != cuda_driver.NOT_FOUND:
                raise
            raise self._refuse(f"image {step.image} has no such kernel") from None
        static = driver.function_attribute(cuda_driver.STATIC_SHARED, self.function)
        self.info = KernelInfo(
            name=step.kernel,
            grid=step.grid,
            block=step.block,
            cluster=step.cluster,
            shared_bytes=static + step.shared_bytes,
            registers=driver.function_attribute(cuda_driver.REGISTERS, self.function),
            spill_bytes=driver.function_attribute(cuda_driver.LOCAL_BYTES, self.function),
        )
        self._check_parameters(driver.parameter_sizes(self.function))
        self._check_block(static, driver.function_attribute(cuda_driver.MAX_THREADS, self.function))
        self._offsets: list[int] = []
        size = 0
        for param in step.params:
            self._offsets.append(size)
            size += -(-len(param.data) // _ALIGNMENT) * _ALIGNMENT
        template = bytearray(size)
        for offset, param in zip(self._offsets, step.params, strict=True):
            template[offset : offset + len(param.data)] = param.data
        self._template = bytes(template)
        self._pointers = [
            (offset + pointer.offset, pointer.buffer, pointer.addend)
            for offset, param in zip(self._offsets, step.params, strict=True)
            for pointer in param.pointers
        ]
        self._maps = [
            (offset + item.offset, item.buffer, item.addend, number, _map_arguments(item))
            for number, (offset, param) in enumerate(zip(self._offsets, step.params, strict=True))
            for item in param.tensor_maps
        ]

    def _refuse(self, why: str) -> DeviceFault:
        return DeviceFault("launch_error", f"kernel {self.step.kernel[:200]}: {why}", self.step.kernel)

    def _check_parameters(self, declared: tuple[int, ...]) -> None:
        given = tuple(len(param.data) for param in self.step.params)
        if len(given) != len(declared):
            raise self._refuse(f"takes {len(declared)} parameters, the plan gives {len(given)}")
        for number, (want, got) in enumerate(zip(declared, given, strict=True)):
            if want != got:
                raise self._refuse(f"parameter {number} has {want} bytes, the plan gives {got}")

    def _check_block(self, static: int, max_threads: int) -> None:
        threads, limit = math.prod(self.step.block), self.device.shared_limit
        if threads > max_threads:
            raise self._refuse(
                f"a block of {threads} threads is too large: with {self.info.registers} registers per thread and its "
                f"launch bounds the kernel allows {max_threads}"
            )
        if static + self.step.shared_bytes > limit:
            raise self._refuse(
                f"needs {static} bytes of static and {self.step.shared_bytes} of dynamic shared memory per block, "
                f"{self.device.name} has {limit}"
            )

    def prepare_function(self) -> None:
        """Allow the function this launch's dynamic shared memory and cluster size."""
        driver = self.device.driver
        driver.set_function_attribute(self.function, cuda_driver.MAX_DYNAMIC_SHARED, self.step.shared_bytes)
        if math.prod(self.step.cluster) > _PORTABLE_CLUSTER:
            driver.set_function_attribute(self.function, cuda_driver.NON_PORTABLE_CLUSTER, 1)

    def check_residency(self) -> None:
        """Refuse what must be resident at once and does not fit: a cluster, or the grid of a cooperative launch."""
        step, device = self.step, self.device
        cluster = math.prod(step.cluster)
        if cluster > 1 and not device.driver.active_clusters(self.function, self._config()):
            raise self._refuse(
                f"no cluster of {cluster} blocks fits on {device.name} with {math.prod(step.block)} threads, "
                f"{self.info.shared_bytes} bytes of shared memory and {self.info.registers} registers per thread"
            )
        if step.cooperative:
            threads = math.prod(step.block)
            resident = device.driver.blocks_per_multiprocessor(self.function, threads, step.shared_bytes)
            if math.prod(step.grid) > resident * device.multiprocessors:
                raise self._refuse(
                    f"a cooperative grid of {math.prod(step.grid)} blocks must be resident at once, "
                    f"{device.name} holds {resident * device.multiprocessors}"
                )

    def _config(self) -> cuda_driver.LaunchConfig:
        step = self.step
        return cuda_driver.launch_config(
            step.grid, step.block, step.shared_bytes, step.cluster, step.cooperative, step.programmatic
        )

    def prepare(self, addresses: Sequence[int]) -> PreparedLaunch:
        """Patch the addresses of the plan's buffers into the parameters.

        Raises:
            DeviceFault: ``launch_error`` if the driver refuses a tensor map.
        """
        storage = ctypes.create_string_buffer(len(self._template) + _ALIGNMENT)
        base = -(-ctypes.addressof(storage) // _ALIGNMENT) * _ALIGNMENT
        ctypes.memmove(base, self._template, len(self._template))
        for offset, buffer, addend in self._pointers:
            ctypes.c_uint64.from_address(base + offset).value = addresses[buffer] + addend
        for offset, buffer, addend, number, arguments in self._maps:
            self._encode(base + offset, addresses[buffer] + addend, number, arguments)
        count = len(self._offsets)
        pointers = (ctypes.c_void_p * max(1, count))(*[base + offset for offset in self._offsets])
        config = self._config()
        call = partial(self.device.driver.launch_kernel, ctypes.byref(config), self.function, pointers, None)
        return PreparedLaunch(call, config, (storage, pointers))

    def _encode(self, destination: int, address: int, number: int, arguments: tuple[Any, ...]) -> None:
        # Encoded aside: a descriptor within a larger parameter need not be aligned as the driver asks.
        scratch = ctypes.create_string_buffer(cuda_driver.TENSOR_MAP_BYTES + cuda_driver.TENSOR_MAP_ALIGNMENT)
        aligned = -(-ctypes.addressof(scratch) // cuda_driver.TENSOR_MAP_ALIGNMENT) * cuda_driver.TENSOR_MAP_ALIGNMENT
        try:
            self.device.driver.encode_tensor_map(aligned, address, arguments)
        except cuda_driver.CudaError as error:
            if error.code != cuda_driver.INVALID_VALUE:
                raise
            dims, strides, box = (list(arguments[index]) for index in (2, 3, 4))
            raise self._refuse(
                f"parameter {number}: the driver refuses the tensor map with dimensions {dims}, strides "
                f"{strides[: len(dims) - 1]} bytes, box {box} and address {address:#x}"
            ) from None
        ctypes.memmove(destination, aligned, cuda_driver.TENSOR_MAP_BYTES)


def _map_arguments(item: Any) -> tuple[Any, ...]:
    return cuda_driver.tensor_map_arguments(
        item.dtype,
        item.dims,
        item.strides,
        item.box,
        item.element_strides,
        (item.interleave, item.swizzle, item.l2_promotion, item.oob_fill),
    )
