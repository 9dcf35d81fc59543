"""Warps that drift apart: a missing barrier shows within five runs, and correct programs stay correct."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from simulated import fault_of, plan_of, ptx_of

from mkb_env.devices.simulator import SimulatorDevice
from mkb_env.devices.simulator.schedule import Schedule

RUNS = 5
"""As many as a verdict has draws."""


def runs_of(source: str, *arguments: torch.Tensor, cooperative: bool = False, **launch: int) -> list[list[float]]:
    """The first argument after each of RUNS runs of one loaded plan, from the same start."""
    plan, tensors = plan_of(ptx_of(source), arguments, cooperative=cooperative, **launch)
    loaded = SimulatorDevice(time_limit=30).load(plan)
    results = []
    for _ in range(RUNS):
        fresh = [tensor.clone() for tensor in tensors]
        loaded.bind(fresh).run()
        results.append(fresh[0].flatten().tolist())
    return results


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize("warps", [2, 3, 4, 7, 8, 16, 25, 32])
def test_every_warp_runs_ahead_of_every_other_one_in_every_block(warps: int) -> None:
    ahead = np.zeros((6, warps, warps), bool)
    for run in range(1, RUNS):
        ranks = Schedule(run, seed=warps).ranks(warps, 3, 6, False)
        assert ranks.min() == 0 and ranks.max() < Schedule(run).groups(warps, False) <= 6
        ahead |= ranks[:, :, None] < ranks[:, None, :]
    assert (ahead | np.eye(warps, dtype=bool)).all()


HANDOVER = """extern "C" __global__ void k(int* o) { __shared__ int s[1024]; int t = threadIdx.x, n = blockDim.x;
    s[t] = t + 1; BARRIER o[blockIdx.x * n + t] = s[n - 1 - t]; }"""
OVERWRITE = """extern "C" __global__ void k(int* o) { __shared__ int s[1024];
    int t = threadIdx.x, n = blockDim.x, v = 0;
    for (int i = 0; i < 3; i++) { s[t] = t + i; __syncthreads(); v += s[n - 1 - t]; BARRIER }
    o[blockIdx.x * n + t] = v; }"""
FROM_ONE_WARP = """extern "C" __global__ void k(int* o) { __shared__ volatile int s; int t = threadIdx.x;
    if (t / 32 == 5) s = 7; BARRIER o[blockIdx.x * blockDim.x + t] = t / 32 == 2 ? s : 1; }"""
THROUGH_GLOBAL = """extern "C" __global__ void k(int* o) { int t = threadIdx.x, n = blockDim.x; o += 2 * blockIdx.x * n;
    o[t] = t + 1; BARRIER o[n + t] = o[n - 1 - t]; }"""


@pytest.mark.parametrize("block", [64, 256, 1000])
@pytest.mark.parametrize("grid", [1, 5])
@pytest.mark.parametrize("source", [HANDOVER, OVERWRITE, FROM_ONE_WARP, THROUGH_GLOBAL])
def test_a_missing_barrier_shows(source: str, grid: int, block: int) -> None:
    right = runs_of(source.replace("BARRIER", "__syncthreads();"), ints(grid, 2 * block), grid=grid, block=block)
    assert all(result == right[0] for result in right)
    assert any(right[0])
    if source is FROM_ONE_WARP and block == 64:
        return
    wrong = runs_of(source.replace("BARRIER", ""), ints(grid, 2 * block), grid=grid, block=block)
    assert wrong[0] == right[0]
    for number in range(grid):  # in every block
        of_block = slice(number * 2 * block, (number + 1) * 2 * block)
        if source is not THROUGH_GLOBAL:
            of_block = slice(number * block, (number + 1) * block)
        assert any(result[of_block] != right[0][of_block] for result in wrong[1:]), number


def test_a_missing_grid_barrier_shows() -> None:
    body = """#include <cooperative_groups.h>
        extern "C" __global__ void k(int* o, int* w) { int b = blockIdx.x, n = gridDim.x;
        w[b] = b + 1; BARRIER o[b] = w[n - 1 - b]; }"""
    barrier = """__threadfence(); if (threadIdx.x == 0) { atomicAdd(w + n, 1);
        while (*(volatile int*)(w + n) < n) {} } __syncthreads();"""
    source = body.replace("#include <cooperative_groups.h>\n", "")
    right = runs_of(source.replace("BARRIER", barrier), ints(8), ints(9), grid=8, block=32, cooperative=True)
    assert right == [list(range(8, 0, -1))] * RUNS
    wrong = runs_of(source.replace("BARRIER", ""), ints(8), ints(9), grid=8, block=32, cooperative=True)
    assert any(result != right[0] for result in wrong[1:])


SPIN_FLAGS = """extern "C" __global__ void k(int* o) { __shared__ volatile int flag[32], data[32];
    int w = threadIdx.x / 32;
    if (threadIdx.x < 32) flag[threadIdx.x] = 0; __syncthreads();
    if (threadIdx.x % 32 == 0) { int v = 1;
        if (w > 0) { while (flag[w - 1] == 0) {} __threadfence_block(); v = data[w - 1] + w; }
        data[w] = v; __threadfence_block(); flag[w] = 1; o[blockIdx.x * blockDim.x / 32 + w] = v; } }"""
BACKWARDS = SPIN_FLAGS.replace("w > 0", "w < blockDim.x / 32 - 1").replace("w - 1", "w + 1")
COUNTED = SPIN_FLAGS.replace("while (flag[w - 1] == 0) {}", "for (int i = 0; flag[w - 1] == 0; i++) data[31] = i;")
LOCK = """extern "C" __global__ void k(int* o) { __shared__ int lock, sum; if (threadIdx.x == 0) { lock = 0; sum = 0; }
    __syncthreads();
    if (threadIdx.x % 32 == 0) { while (atomicCAS(&lock, 0, 1) != 0) {} __threadfence_block();
        *(volatile int*)&sum = *(volatile int*)&sum + 1; __threadfence_block(); atomicExch(&lock, 0); }
    __syncthreads(); if (threadIdx.x < 8) o[blockIdx.x * 8 + threadIdx.x] = sum; }"""
NAMED = """extern "C" __global__ void k(int* o) { __shared__ int s[32]; int t = threadIdx.x & 31, w = threadIdx.x / 32;
    for (int i = 0; i < 5; i++) {
        if (w == 3) { s[t] = 100 * i + t; asm volatile("bar.arrive 1, 256;" ::: "memory");
            asm volatile("bar.sync 2, 256;" ::: "memory"); }
        else { asm volatile("bar.sync 1, 256;" ::: "memory"); int v = s[31 - t];
            asm volatile("bar.arrive 2, 256;" ::: "memory"); if (t == 0 && i == 4) o[blockIdx.x * 8 + w] = v; } } }"""
MBARRIER = """__device__ void wait(unsigned b, int phase) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W; }"
        :: "r"(b), "r"(phase) : "memory"); }
    __device__ void arrive(unsigned b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(b) : "memory"); }
    extern "C" __global__ void k(int* o) { __shared__ long long bars[2]; __shared__ int s[32];
    int t = threadIdx.x & 31, w = threadIdx.x / 32; unsigned full = (unsigned)__cvta_generic_to_shared(bars);
    if (threadIdx.x == 0) { asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(full));
        asm volatile("mbarrier.init.shared.b64 [%0], 224;" :: "r"(full + 8)); }
    __syncthreads(); int sum = 0;
    for (int i = 0; i < 6; i++) {
        if (w == 7) { if (i) wait(full + 8, (i - 1) & 1); s[t] = 10 * i + t; arrive(full); }
        else { wait(full, i & 1); sum += s[31 - t]; arrive(full + 8); } }
    if (t == 0) o[blockIdx.x * 8 + w] = sum; }"""
CLUSTER = """extern "C" __global__ void k(int* o) { __shared__ int s[256]; s[threadIdx.x] = threadIdx.x;
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x < 8) o[blockIdx.x * 8 + threadIdx.x] = s[255 - threadIdx.x]; }"""


@pytest.mark.parametrize("source", [SPIN_FLAGS, BACKWARDS, COUNTED, LOCK, NAMED, MBARRIER, CLUSTER])
def test_programs_that_synchronise_are_right_in_every_run(source: str) -> None:
    block = 64 if source is COUNTED else 256  # its waits are not recognised as such, so that each takes SPIN blocks
    results = runs_of(source, ints(3, 8), grid=3, block=block)
    assert any(results[0]) and all(result == results[0] for result in results), results


def test_clusters_of_several_blocks_are_refused() -> None:
    ptx = ptx_of('extern "C" __global__ void k(int* o) { o[blockIdx.x] = 1; }')
    plan, _ = plan_of(ptx, (ints(4),), grid=4)
    (launch,) = plan.launches
    clustered = msgspec.structs.replace(plan, steps=(msgspec.structs.replace(launch, cluster=(2, 1, 1)),))
    fault = fault_of(SimulatorDevice().load, clustered)
    assert fault.stage == "unsupported" and "clusters of 2 x 1 x 1 blocks" in fault.message
    required = ptx_of('extern "C" __global__ void __cluster_dims__(1, 4) k(int* o) { o[blockIdx.x] = 1; }')
    fault = fault_of(SimulatorDevice().load, plan_of(required, (ints(4),), grid=4)[0])
    assert fault.stage == "unsupported" and "clusters of 1 x 4 x 1 blocks" in fault.message
    alone = ptx_of('extern "C" __global__ void __cluster_dims__(1) k(int* o) { o[blockIdx.x] = 1; }')
    SimulatorDevice().load(plan_of(alone, (ints(4),), grid=4)[0])
