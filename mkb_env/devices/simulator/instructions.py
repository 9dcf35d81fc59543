"""Resolved programs: values, instructions, basic blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.operands import Imm
from mkb_env.devices.simulator.parser import Variable

SHARED_BASE = 1024
"""First shared-memory address of a block: the driver keeps the first KiB for itself on Hopper."""
TERMINATORS = frozenset({"bra", "brx", "ret", "exit", "trap", "bar", "barrier"})
WARP_SYNC = frozenset({"shfl", "vote", "match", "redux", "elect", "mma", "ldmatrix", "stmatrix", "movmatrix", "wgmma"})
NO_RESULT = frozenset({
    "st", "red", "bra", "brx", "ret", "exit", "trap", "brkpt", "call", "membar", "fence", "prefetch", "prefetchu", "cp",
    "stmatrix", "nanosleep", "setmaxnreg", "griddepcontrol", "applypriority", "discard", "pmevent", "stackrestore",
})  # fmt: skip
"""Opcodes whose first operand is not a destination."""


@dataclass(frozen=True)
class Register:
    """A register of ``nbytes`` (a predicate has 1 and is held as bool)."""

    index: int
    nbytes: int
    predicate: bool = False


@dataclass(frozen=True)
class Symbol:
    """A variable's address: an offset in ``shared``, ``local`` or ``param``, an absolute address in ``global``."""

    space: str
    value: int
    name: str


@dataclass(frozen=True)
class Special:
    """A special register, without its percent sign."""

    name: str


@dataclass(frozen=True)
class Memory:
    """A resolved ``[base + offset]``."""

    base: Register | Symbol | None
    offset: int
    extra: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Many:
    """A resolved vector, pair or argument list; None stands for the sink ``_``."""

    items: tuple[Value | None, ...]
    pair: bool = False


@dataclass(frozen=True)
class Not:
    """A negated predicate."""

    register: Register


Value = Register | Symbol | Special | Memory | Many | Not | Imm


@dataclass
class Instruction:
    """One resolved instruction. ``targets`` are instruction numbers, for branches."""

    opcode: str
    line: int
    text: str
    guard: Register | None
    negated: bool
    operands: tuple[Value | None, ...]
    parts: tuple[str, ...] = ()
    targets: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.parts[0]


@dataclass
class Block:
    """Instructions ``begin`` to ``end`` (exclusive), of which only the last may branch. Register sets are bit masks."""

    begin: int
    end: int
    successors: tuple[int, ...] = ()
    uses: int = 0
    defines: int = 0
    live_in: int = 0
    live_out: int = 0
    use_list: tuple[int, ...] = ()
    dead_list: tuple[int, ...] = ()


@dataclass
class Program:
    """An entry, ready to be decoded."""

    name: str
    params: tuple[Variable, ...]
    param_offsets: tuple[int, ...]
    param_bytes: int
    directives: str
    instructions: list[Instruction] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    block_of: dict[int, int] = field(default_factory=dict)
    labels: set[int] = field(default_factory=set)
    """Instruction numbers that something may branch to."""
    registers: int = 1
    """How many registers there are; number 0 is the carry flag."""
    static_shared: int = 0
    local_bytes: int = 0
    widths: list[tuple[int, bool]] = field(default_factory=lambda: [(1, True)])
    """Per register: bytes, and whether it is a predicate."""

    def fail(self, line: int, message: str) -> DeviceFault:
        return DeviceFault("unsupported", f"{message} (kernel {self.name}, PTX line {line})", self.name)
