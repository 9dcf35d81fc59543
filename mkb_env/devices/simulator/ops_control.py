"""Instructions that change nothing here, and those that end a run (PTX ISA 9.7.12, 9.7.13, 9.7.20).

Branches, exits and barriers are the machine's.
"""

from __future__ import annotations

import numpy as np

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.decode import Operation, Unsupported, opcode, writer
from mkb_env.devices.simulator.frame import Frame
from mkb_env.devices.simulator.instructions import Instruction


def _nothing(frame: Frame) -> None:
    """Do nothing."""


@opcode(
    "membar", "fence", "prefetch", "prefetchu", "nanosleep", "setmaxnreg", "griddepcontrol", "applypriority", "discard",
    "pmevent",
)  # fmt: skip
def _no_op(instruction: Instruction) -> Operation:
    """Orders, hints and resources: lanes run in order, writes are visible at once, registers are plentiful."""
    return _nothing


@opcode("createpolicy")
def _createpolicy(instruction: Instruction) -> Operation:
    write = writer(instruction.operands[0], "b64")
    return lambda frame: write(frame, np.zeros(1, np.uint64))


@opcode("trap", "brkpt")
def _trap(instruction: Instruction) -> Operation:
    def operation(frame: Frame) -> None:
        raise _ended(frame, instruction, f"{instruction.name} was executed")

    return operation


def _ended(frame: Frame, instruction: Instruction, what: str) -> DeviceFault:
    chunk = frame.chunk
    where = chunk.describe(int(frame.lanes[0]))
    return DeviceFault(
        "launch_error",
        f"{what}\n  at PTX line {instruction.line} of {chunk.program.name}\n  by {where}",
        chunk.program.name,
    )


@opcode("call")
def _call(instruction: Instruction) -> Operation:
    """Calls that were not inlined: library functions without a body, and forms that cannot be."""
    _, why, name = instruction.parts
    if name == "vprintf":
        return _nothing
    if name in ("__assertfail", "__assert_fail"):

        def failed(frame: Frame) -> None:
            raise _ended(frame, instruction, "a device-side assertion failed")

        return failed
    if why == "deep":
        raise Unsupported(f"recursion, or calls nested too deeply, at {name}")
    raise Unsupported(f"call of {name}, which is indirect, predicated, or has no body")
