"""The simulator as a device: loads launch plans, binds them to CPU tensors, runs them."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mkb_env.devices.base import POISON_BYTE, DeviceFault, KernelInfo
from mkb_env.devices.simulator import (  # noqa: F401  (the ops modules register their opcodes)
    ops_atomic,
    ops_bits,
    ops_control,
    ops_data,
    ops_float,
    ops_integer,
    ops_matrix,
    ops_mbarrier,
    ops_memory,
    ops_warp,
    timing,
)
from mkb_env.devices.simulator.blocks import make_blocks
from mkb_env.devices.simulator.chunk import LaunchContext
from mkb_env.devices.simulator.machine import Code, run_launch
from mkb_env.devices.simulator.memory import MODULE_BASE, GlobalMemory, Region
from mkb_env.devices.simulator.operands import Imm, Name, parse_operands
from mkb_env.devices.simulator.parser import TYPE_BYTES, Module, PtxError, Variable, parse_module
from mkb_env.devices.simulator.program import build
from mkb_env.devices.simulator.schedule import Schedule
from mkb_env.plan import Copy, Fill, Launch, LaunchPlan, TensorView, Upload

MAX_SHARED_PER_BLOCK = 232448
_REQUIRED_CLUSTER = re.compile(r"\.reqnctapercluster\s+(\d+(?:\s*,\s*\d+)*)")


class SimulatorDevice:
    """Runs plans on the CPU, from the PTX of their images.

    ``time_limit`` (seconds of processor time for one ``run``, so that a busy machine changes no verdict) and
    ``block_budget`` (basic blocks executed by one launch) bound endless loops.
    """

    simulated = True
    torch_device = torch.device("cpu")

    def __init__(self, time_limit: float = 30.0, block_budget: int = 20_000_000, target: str = "sm_90a") -> None:
        self.name = f"simulator ({target})"
        self.time_limit, self.block_budget, self.target = time_limit, block_budget, target

    def load(self, plan: LaunchPlan) -> SimulatedPlan:
        """Parse the images and resolve every kernel that the plan launches.

        Raises:
            DeviceFault: ``launch_error`` for a kernel that does not exist, wrong parameter sizes or too much shared
                memory; ``unsupported`` for an image without PTX or PTX that cannot be read.
        """
        return SimulatedPlan(self, plan)

    def synchronize(self) -> None:
        """Nothing is pending: ``run`` returns when all is done."""


class ImageCode:
    """A module of a plan: its kernels, decoded on demand, and its variables in memory."""

    def __init__(self, ptx: str, number: int) -> None:
        if not ptx:
            raise DeviceFault("unsupported", "the image holds no PTX text; the simulator cannot run a cubin")
        self.number = number
        self.next = MODULE_BASE + (number << 36)
        self.addresses: dict[str, int] = {}
        self.regions: list[Region] = []
        self.codes: dict[str, Code] = {}
        try:
            self.module: Module = parse_module(ptx)
        except PtxError as error:
            raise DeviceFault("unsupported", f"the PTX of image {number} cannot be read: {error}") from None

    def code(self, kernel: str) -> Code:
        """The decoded kernel. Raises DeviceFault."""
        if kernel not in self.codes:
            try:
                program = build(self.module, kernel, self.address_of)
                make_blocks(program)
                self.codes[kernel] = Code(program)
            except PtxError as error:
                raise DeviceFault("unsupported", f"the PTX of {kernel} cannot be read: {error}", kernel) from None
        return self.codes[kernel]

    def address_of(self, variable: Variable) -> int:
        """Place a global or constant variable, with its initial value, on first use."""
        if variable.name not in self.addresses:
            align = max(256, variable.align)
            start = -(-self.next // align) * align
            self.addresses[variable.name] = start
            data = np.zeros(max(variable.nbytes, 1), np.uint8)
            self.next = start + len(data) + 4096
            if variable.initial:
                _initialise(data, variable, self)
            self.regions.append(Region(f"{variable.space} variable {variable.name}", start, data))
        return self.addresses[variable.name]


def _initialise(data: NDArray[np.uint8], variable: Variable, image: ImageCode) -> None:
    """Fill a variable from its initialiser. Raises DeviceFault for forms that are not simulated."""
    size = TYPE_BYTES[variable.type]
    flat = re.sub(r"[{}]|\bgeneric\b\s*|[()]", " ", variable.initial)
    for number, operand in enumerate(parse_operands(flat.strip().rstrip(","))):
        value = 0
        if isinstance(operand, Imm):
            value = operand.value
        elif isinstance(operand, Name) and operand.text in image.module.variables:
            value = image.address_of(image.module.variables[operand.text]) + operand.offset
        else:
            raise DeviceFault("unsupported", f"initialiser of {variable.name}: {variable.initial[:60]!r}")
        data[number * size : (number + 1) * size] = np.frombuffer(
            (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little"), np.uint8
        )


class SimulatedPlan:
    """A plan whose images are parsed."""

    def __init__(self, device: SimulatorDevice, plan: LaunchPlan) -> None:
        self.device, self.plan = device, plan
        self.images = [ImageCode(image.ptx, number) for number, image in enumerate(plan.images)]
        self.estimate: float | None = None
        self.runs, self.seed = 0, random.randrange(1 << 30)
        self.kernels = tuple(self._check(launch) for launch in plan.launches)

    def _check(self, launch: Launch) -> KernelInfo:
        """What a launch uses. Raises DeviceFault if the device would refuse it."""
        program = self.images[launch.image].code(launch.kernel).program
        sizes = [len(param.data) for param in launch.params]
        wanted = [variable.nbytes for variable in program.params]
        if sizes != wanted:
            raise DeviceFault(
                "launch_error",
                f"kernel {launch.kernel} takes parameters of {wanted} bytes, the launch gives {sizes}",
                launch.kernel,
            )
        cluster: tuple[int, ...] = launch.cluster
        if math.prod(cluster) == 1 and (required := _REQUIRED_CLUSTER.search(program.directives)):
            cluster = tuple(int(number) for number in required[1].split(","))
        if math.prod(cluster) > 1:
            raise DeviceFault(
                "unsupported",
                f"kernel {launch.kernel} runs in clusters of {' x '.join(map(str, cluster))} blocks; the simulator has "
                "clusters of one block only: launch it without clusters, or judge it on a GPU",
                launch.kernel,
            )
        shared = program.static_shared + launch.shared_bytes
        if shared > MAX_SHARED_PER_BLOCK:
            raise DeviceFault(
                "launch_error",
                f"kernel {launch.kernel} needs {shared} bytes of shared memory, a block has {MAX_SHARED_PER_BLOCK}",
                launch.kernel,
            )
        return KernelInfo(
            name=launch.kernel,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            shared_bytes=shared,
            registers=self.plan.images[launch.image].registers.get(launch.kernel),
            spill_bytes=program.local_bytes,
        )

    def bind(self, inputs: Sequence[torch.Tensor | bool | int | float]) -> SimulatedRun:
        """See :class:`mkb_env.devices.base.LoadedPlan`. Raises DeviceFault for inputs that do not fit the plan."""
        return SimulatedRun(self, inputs)

    def estimate_us(self) -> float | None:
        """The time model's estimate for the last run in microseconds; None before the first."""
        return self.estimate

    def close(self) -> None:
        """Drop the decoded code."""
        self.images.clear()


class SimulatedRun:
    """A plan bound to tensors. Buffers are seen as bytes; addresses differ from one binding to the next."""

    def __init__(self, loaded: SimulatedPlan, inputs: Sequence[torch.Tensor | bool | int | float]) -> None:
        self.loaded, self.plan = loaded, loaded.plan
        self.buffers: list[torch.Tensor] = []
        names = []
        for number, buffer in enumerate(self.plan.buffers):
            if buffer.input is None:
                self.buffers.append(torch.empty(buffer.nbytes, dtype=torch.uint8))
                names.append(f"workspace {number}")
            else:
                self.buffers.append(_as_bytes(inputs, buffer.input, buffer.nbytes))
                names.append(f"input {buffer.input}")
        for number, view in enumerate(self.plan.outputs):
            if self.plan.buffers[view.buffer].input is None:
                names[view.buffer] = f"output {number}"
        self.memory = GlobalMemory()
        arrays = [buffer.numpy() for buffer in self.buffers]
        seed = random.randrange(1 << 30)
        self.addresses = self.memory.place(list(zip(names, arrays, strict=True)), seed)
        for image in loaded.images:
            for region in image.regions:
                self.memory.add(region)
        self.outputs = tuple(self._view(view) for view in self.plan.outputs)

    def _view(self, view: TensorView) -> torch.Tensor:
        dtype = getattr(torch, view.dtype)
        buffer = self.buffers[view.buffer]
        whole = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(view.shape, view.strides, whole.storage_offset() + view.offset // dtype.itemsize)

    def poison(self) -> None:
        """Fill every buffer that is not an input with POISON_BYTE."""
        for buffer, tensor in zip(self.plan.buffers, self.buffers, strict=True):
            if buffer.input is None:
                tensor.fill_(POISON_BYTE)

    def run(self) -> None:
        """Run all steps once: in lockstep in the plan's first run, with drifting warps later. Raises DeviceFault."""
        deadline = time.thread_time() + self.loaded.device.time_limit
        self.schedule = Schedule(self.loaded.runs, self.loaded.seed)
        self.loaded.runs += 1
        total = timing.START_US
        for step in self.plan.steps:
            if isinstance(step, Launch):
                total += self._launch(step, deadline)
            else:
                total += self._memory_step(step)
        self.loaded.estimate = total

    def _memory_step(self, step: Fill | Copy | Upload) -> float:
        """Run a step through torch; returns its estimated microseconds."""
        target = self._view(step.target)
        if isinstance(step, Fill):
            target.fill_(step.value)
        elif isinstance(step, Copy):
            target.copy_(self._view(step.source))
        else:
            data = torch.frombuffer(bytearray(step.data), dtype=torch.uint8) if step.data else torch.empty(0)
            if step.data:
                start = step.target.offset
                self.buffers[step.target.buffer][start : start + len(step.data)] = data
        moved = target.numel() * target.element_size()
        return timing.memory_step_us(moved * 2 if isinstance(step, Copy) else moved)

    def _launch(self, step: Launch, deadline: float) -> float:
        image = self.loaded.images[step.image]
        code = image.code(step.kernel)
        for region in self.memory.regions:
            region.low, region.high = 1 << 62, 0
        launch = LaunchContext(
            program=code.program,
            memory=self.memory,
            params=self._params(step, code.program.param_offsets, code.program.param_bytes),
            grid=step.grid,
            block=step.block,
            cluster=step.cluster,
            dynamic_shared=step.shared_bytes,
            deadline=deadline,
            schedule=self.schedule,
            cooperative=step.cooperative,
            block_budget=self.loaded.device.block_budget,
        )
        run_launch(launch, code)
        registers = self.plan.images[step.image].registers.get(step.kernel)
        return timing.launch_us(launch, code.program, registers)

    def _params(self, step: Launch, offsets: tuple[int, ...], nbytes: int) -> NDArray[np.uint8]:
        """The parameter bytes, with the addresses of this binding."""
        params = np.zeros(nbytes, np.uint8)
        for offset, param in zip(offsets, step.params, strict=True):
            data = bytearray(param.data)
            for pointer in param.pointers:
                value = self.addresses[pointer.buffer] + pointer.addend
                data[pointer.offset : pointer.offset + 8] = value.to_bytes(8, "little")
            if param.tensor_maps:
                raise DeviceFault("unsupported", "tensor maps (TMA descriptors) are not simulated", step.kernel)
            params[offset : offset + len(data)] = np.frombuffer(bytes(data), np.uint8)
        return params


def _as_bytes(inputs: Sequence[Any], position: int, nbytes: int) -> torch.Tensor:
    """Input ``position`` as a flat uint8 tensor that shares its memory. Raises DeviceFault."""
    tensor = inputs[position] if position < len(inputs) else None
    if not isinstance(tensor, torch.Tensor):
        raise DeviceFault("infra_error", f"input {position} of the plan is a tensor, the binding gives {type(tensor)}")
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise DeviceFault("infra_error", f"input {position} must be contiguous and on the CPU")
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    if flat.numel() != nbytes:
        raise DeviceFault("infra_error", f"input {position} has {flat.numel()} bytes, the plan states {nbytes}")
    return flat
