"""The least time that a problem's bytes and operations take on a device, and how near a kernel comes to it.

The roofline model (Williams, Waterman, Patterson 2009): a kernel takes at least the longer of the time to move its
bytes and the time to do its operations. Loads no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from mkb_env.problems.contract import Cost

FLOOR = 0.95
"""A time below this share of what the datasheet's peaks allow is no time of the whole work."""


class Ceilings(msgspec.Struct, frozen=True):
    """What a device can do at the most."""

    device: str
    bytes_per_us: float
    """Device memory, read and written together."""
    flops_per_us: dict[str, float]
    """By ``Cost.unit``."""
    measured: bool = True


H200 = Ceilings(
    "NVIDIA H200", 4.8e6, {"bf16": 989e6, "fp8": 1979e6, "tf32": 495e6, "3xtf32": 165e6, "fp32": 67e6}, measured=False
)
"""Datasheet of the H200 SXM: memory bandwidth; dense tensor cores by operand type, CUDA cores for fp32.

``3xtf32`` is a float32 product as three TF32 ones of split operands, which keep float32's precision."""


def bound_us(cost: Cost, ceilings: Ceilings = H200) -> float:
    """The longer of moving ``cost.bytes`` and doing ``cost.flops``, in microseconds."""
    return max(cost.bytes / ceilings.bytes_per_us, cost.flops / ceilings.flops_per_us[cost.unit])


def is_memory_bound(cost: Cost, ceilings: Ceilings = H200) -> bool:
    """Whether moving the bytes is the longer of the two."""
    return cost.bytes / ceilings.bytes_per_us >= cost.flops / ceilings.flops_per_us[cost.unit]


def score(cost: Cost, kernel_us: float, ceilings: Ceilings) -> float:
    """Share of the bound in the time: 1 for a kernel at the roofline, less for a slower one."""
    return min(1.0, bound_us(cost, ceilings) / kernel_us)


def is_impossible(cost: Cost, kernel_us: float) -> bool:
    """Whether a time is below what the datasheet's peaks allow: it was not the whole work, or not timed right."""
    return kernel_us < FLOOR * bound_us(cost)


def ceilings_file() -> Path:
    """Where measured ceilings are kept: ``MKB_CONFIG_DIR``, else mkb-env in ``XDG_CONFIG_HOME`` or ``~/.config``."""
    chosen = os.environ.get("MKB_CONFIG_DIR")
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return (Path(chosen) if chosen else base / "mkb-env") / "ceilings.json"


def ceilings_of(device: str) -> Ceilings:
    """What was measured of a device (``mkb doctor --measure``), else the H200's datasheet."""
    try:
        kept = msgspec.json.decode(ceilings_file().read_bytes(), type=dict[str, Ceilings])
    except (OSError, msgspec.MsgspecError):
        return H200
    return kept.get(device, H200)


def keep(ceilings: Ceilings) -> Path:
    """Store measured ceilings beside those of other devices; returns the file.

    Raises:
        OSError: if the file cannot be written.
    """
    path = ceilings_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    kept[ceilings.device] = msgspec.to_builtins(ceilings)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
    return path
