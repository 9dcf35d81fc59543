"""A first time model: what a launch would take on an H200, from counts made while it was simulated.

    t = START_US + for each launch: LAUNCH_US + max(memory, L2, issue, tensor cores, latency)

- memory: bytes moved to and from device memory over ``MEMORY_BYTES_PER_US``: the lesser of all 32-byte sectors
  requested and the ranges of addresses touched, that is, every repeated access is taken to hit the L2 cache.
- L2: all sectors requested, over ``L2_BYTES_PER_US``.
- issue: warp instructions weighted by what they hold a scheduler for (table below), spread over the schedulers of the
  SMs that have a block.
- tensor cores: operations of ``mma`` over the unit's rate.
- latency: the time a warp takes alone (dependent instructions, one memory latency per basic block with loads,
  barriers), times the waves of blocks that the SMs' registers, threads and shared memory allow.

Not modelled: bank conflicts, L1 hits, the compiler's scheduling below PTX, contention, clock changes, overlap of
launches. Use it to rank kernels, not to predict microseconds. Docs: ``docs/simulator.md``.
"""

from __future__ import annotations

import math

from mkb_env.devices.simulator.chunk import LaunchContext
from mkb_env.devices.simulator.instructions import Instruction, Program

SM_COUNT = 132  # H200 datasheet; cudaDevAttrMultiProcessorCount
CLOCK_MHZ = 1980.0  # highest SM clock, cudaDevAttrClockRate
SCHEDULERS = 4  # per SM, each issues one warp instruction per cycle (CUDA C Programming Guide, compute capability 9.0)
MEMORY_BYTES_PER_US = 4.8e6 * 0.7  # datasheet 4.8 TB/s; with cold caches our kernels reach 2.8 to 3.4 TB/s of it
L2_BYTES_PER_US = 5.5e6  # assumption: public microbenchmarks of Hopper give 5.5 to 7 TB/s
LAUNCH_US = 2.5  # assumption: start and end of a kernel, without the host's part
START_US = 5.0  # the host's part on an idle stream: 5 to 10 us on an H200, with the first launch
MEMORY_LATENCY = 700  # cycles of a load from device memory; microbenchmarks of Hopper give 500 to 800
SHARED_LATENCY = 30  # cycles; also a shuffle and a barrier
ALU_LATENCY = 4.5  # cycles between dependent arithmetic instructions
PARALLELISM = 2.0  # assumption: independent instructions of one warp in flight
FLOPS_PER_US = {
    "f16": 989e6, "bf16": 989e6, "tf32": 494e6, "e4m3": 1979e6, "e5m2": 1979e6, "s8": 1979e6, "u8": 1979e6, "f64": 67e6,
}  # fmt: skip
"""Dense tensor-core rates by multiplicand type (H200 datasheet)."""
MAX_THREADS, MAX_BLOCKS, SM_REGISTERS, SM_SHARED = 2048, 32, 65536, 233472
"""Per SM: resident threads and blocks, registers, bytes of shared memory."""
DEFAULT_REGISTERS = 40
"""Registers per thread where the compiler's number is unknown."""

_FREE = frozenset({
    "mov", "cvta", "membar", "fence", "griddepcontrol", "setmaxnreg", "nanosleep", "createpolicy", "prefetch",
})  # fmt: skip
_SPECIAL_FUNCTION = frozenset(["rcp", "rsqrt", "sqrt", "ex2", "lg2", "sin", "cos", "tanh"])
_LOAD_STORE = frozenset(["ld", "st", "ldu", "atom", "red", "cp", "shfl", "ldmatrix", "stmatrix", "movmatrix"])


def issue_cycles(instruction: Instruction) -> float:
    """Cycles that one warp instruction holds its scheduler's unit for: 32 lanes over the unit's lanes per scheduler
    (CUDA C Programming Guide, throughput of native instructions, compute capability 9.0).
    """
    name, parts = instruction.name, instruction.parts
    if name in _FREE or (name == "ld" and "param" in parts):
        return 0.0
    if name in _SPECIAL_FUNCTION or name in ("div", "rem"):
        return 8.0 if name in _SPECIAL_FUNCTION else 24.0
    if name in _LOAD_STORE:
        return 4.0
    if "f64" in parts:
        return 2.0
    if parts[-1] in ("s64", "u64", "b64"):
        return 3.0
    if name == "cvt":
        return 1.0 if parts[-1] == "bf16" else 2.0  # widening bf16 is a shift
    if parts[-1] in ("f32", "f16x2", "bf16x2"):
        return 1.0
    return 2.0 if name in ("mul", "mad", "shl", "shr", "shf", "prmt", "bfe", "bfi", "popc", "clz") else 1.0


def resident_blocks(threads: int, shared: int, registers: int | None) -> int:
    """Blocks that fit one SM at a time, at least 1."""
    warps = -(-threads // 32)
    per_warp = -(-(registers or DEFAULT_REGISTERS) * 32 // 256) * 256
    limits = (
        MAX_THREADS // (32 * warps),
        SM_REGISTERS // (per_warp * warps),
        SM_SHARED // (shared + 1024),
        MAX_BLOCKS,
    )
    return max(1, min(limits))


def launch_us(launch: LaunchContext, program: Program, registers: int | None) -> float:
    """Estimated duration of a launch that has just run, in microseconds."""
    total_warps = launch.ctas * -(-launch.threads // 32)
    issue = alone = 0.0
    for block, count in zip(program.blocks, launch.block_warps, strict=True):
        if count:
            instructions = program.instructions[block.begin : block.end]
            cycles = sum(map(issue_cycles, instructions))
            issue += count * cycles
            alone += count / total_warps * _latency(instructions, cycles)
    busy = min(launch.ctas, SM_COUNT)
    per_sm = resident_blocks(launch.threads, launch.shared_bytes, registers)
    waves = max(1.0, launch.ctas / (SM_COUNT * per_sm))
    waves = math.ceil(waves) if waves < 4 else waves
    moved, requested = _bytes(launch)
    times = (
        moved / MEMORY_BYTES_PER_US,
        requested / L2_BYTES_PER_US,
        issue / (busy * SCHEDULERS) / CLOCK_MHZ,
        sum(flops / FLOPS_PER_US[kind] for kind, flops in launch.traffic.flops.items()) * SM_COUNT / busy,
        alone * waves / CLOCK_MHZ,
    )
    return LAUNCH_US + max(times)


def _latency(instructions: list[Instruction], cycles: float) -> float:
    """Cycles that a warp alone takes for a basic block."""
    total = max(cycles, len(instructions) * ALU_LATENCY / PARALLELISM)
    spaces = [instruction.parts for instruction in instructions if instruction.name in ("ld", "atom", "ldmatrix")]
    if any("global" in parts or "generic" in parts for parts in spaces):
        total += MEMORY_LATENCY
    if any(part.startswith("shared") for parts in spaces for part in parts):
        total += SHARED_LATENCY
    return total + SHARED_LATENCY * sum(instruction.name in ("shfl", "bar", "barrier") for instruction in instructions)


def _bytes(launch: LaunchContext) -> tuple[float, float]:
    """(bytes that cross device memory, bytes requested of the L2 cache)."""
    traffic = launch.traffic
    requested = 32 * (traffic.sectors(False) + traffic.sectors(True))
    spans = [region.high - region.low for region in launch.memory.regions if region.high > region.low]
    return min(requested, float(sum(spans))), requested


def memory_step_us(moved: int) -> float:
    """Estimated microseconds of a fill, copy or upload that moves that many bytes."""
    return LAUNCH_US + moved / MEMORY_BYTES_PER_US
