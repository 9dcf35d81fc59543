"""The contract between the judge and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

    from mkb_env.plan import LaunchPlan

POISON_BYTE = 0xFF
"""Workspaces and outputs hold this byte before a draw: NaN in every floating-point format, -1 in integers."""


MAX_KERNEL_NAME = 60


def short_name(kernel: str) -> str:
    """A kernel's name as messages show it: mangled names run to hundreds of characters."""
    return kernel if len(kernel) <= MAX_KERNEL_NAME else f"{kernel[:MAX_KERNEL_NAME]}..."


class DeviceFault(Exception):
    """Device code that could not run to its end.

    ``stage`` is the verdict's stage: ``launch_error`` (illegal or misaligned access, bad launch, out of memory),
    ``timeout`` (endless loop, a barrier never completed), ``unsupported`` (the simulator lacks an instruction) or
    ``infra_error`` (the device itself is at fault).
    """

    def __init__(
        self, stage: Literal["launch_error", "timeout", "unsupported", "infra_error"], message: str, kernel: str = ""
    ) -> None:
        super().__init__(message)
        self.stage, self.message, self.kernel = stage, message, kernel


class KernelInfo(msgspec.Struct, frozen=True):
    """One launch of a plan, as a verdict reports it; None where the device cannot tell."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    """Static plus dynamic shared memory of one block."""
    registers: int | None = None
    spill_bytes: int | None = None
    """Local memory per thread."""


class BoundPlan(Protocol):
    """A plan tied to real buffers."""

    outputs: tuple[torch.Tensor, ...]
    """The plan's output views, flat, on the device; they share the plan's buffers."""

    def poison(self) -> None:
        """Fill every buffer that is not an input with ``POISON_BYTE``."""

    def run(self) -> None:
        """Run (simulator) or enqueue on the current stream (GPU) all steps once. Raises DeviceFault."""


class LoadedPlan(Protocol):
    """A plan whose images are loaded."""

    kernels: tuple[KernelInfo, ...]

    def bind(self, inputs: Sequence[torch.Tensor | bool | int | float]) -> BoundPlan:
        """Tie the plan to ``inputs``, ``solve``'s arguments in order (scalars are ignored: the plan holds them).

        Tensors must be contiguous, on the device, and have the byte sizes that the plan's input buffers state.
        Workspaces are allocated once per call of ``bind``.
        """

    def estimate_us(self) -> float | None:
        """Estimated duration of the last ``run`` in microseconds (simulator), or None on a real device."""

    def close(self) -> None:
        """Unload the images."""


class Device(Protocol):
    """Something that runs plans."""

    name: str
    """Shown in verdicts, for example ``NVIDIA H200`` or ``simulator (sm_90a)``."""
    simulated: bool
    torch_device: torch.device

    def load(self, plan: LaunchPlan) -> LoadedPlan:
        """Load the plan's images. Raises DeviceFault."""

    def synchronize(self) -> None:
        """Wait for enqueued work. Raises DeviceFault for faults of the device code."""
