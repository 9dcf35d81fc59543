"""What an agent reads when device code faults."""

from __future__ import annotations

import torch
from simulated import fault_of, run_cuda, run_ptx

from mkb_env.devices.simulator import SimulatorDevice


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_an_overrun_names_buffer_thread_and_instruction() -> None:
    source = 'extern "C" __global__ void k(int* o, int n) { o[blockIdx.x * 64 + threadIdx.x + n] = 1; }'
    fault = fault_of(lambda: run_cuda(source, ints(100), 0, grid=2, block=64))
    assert (fault.stage, fault.kernel) == ("launch_error", "k")
    assert "Invalid __global__ write of size 4 bytes" in fault.message and "out of bounds" in fault.message
    assert "st.global" in fault.message and "PTX line" in fault.message
    assert "thread (36, 0, 0) in block (1, 0, 0) and 27 other threads" in fault.message
    assert fault.message.endswith("\n  it starts right at the end of input 0 of 400 bytes")


def test_an_underrun_and_a_null_pointer() -> None:
    source = 'extern "C" __global__ void k(int* o, int n) { o[0] = o[(int)threadIdx.x - n]; }'
    fault = fault_of(lambda: run_cuda(source, ints(64), 3, block=64))
    assert "read of size 4" in fault.message and "12 bytes before" in fault.message
    source = 'extern "C" __global__ void k(int* o, long long n) { *(int*)n = 1; }'
    fault = fault_of(lambda: run_cuda(source, ints(64), bytes(8), block=1))
    assert "address 0x0 is out of bounds" in fault.message


def test_a_misaligned_vector_access() -> None:
    source = 'extern "C" __global__ void k(float* o) { *(float4*)(o + threadIdx.x) = make_float4(1, 2, 3, 4); }'
    fault = fault_of(lambda: run_cuda(source, torch.zeros(64), block=8))
    assert "misaligned, expected a multiple of 16" in fault.message and "thread (1, 0, 0)" in fault.message


def test_shared_memory_out_of_bounds() -> None:
    source = """extern "C" __global__ void k(int* o, int n) { extern __shared__ int s[];
        s[threadIdx.x] = n; __syncthreads();
        o[threadIdx.x] = s[threadIdx.x ^ 1]; }"""
    run_cuda(source, ints(64), 1, block=64, shared=256)
    fault = fault_of(lambda: run_cuda(source, ints(64), 1, block=64, shared=200))
    assert fault.stage == "launch_error" and "Invalid __shared__ write of size 4" in fault.message
    assert "200 bytes of shared memory" in fault.message and "thread (50, 0, 0)" in fault.message


def test_an_endless_loop_is_a_timeout_by_budget_and_by_clock() -> None:
    source = 'extern "C" __global__ void k(volatile int* o) { if (threadIdx.x < 3) while (o[0] >= 0) o[0] = 1; }'
    fault = fault_of(lambda: run_cuda(source, ints(1), block=64, device=SimulatorDevice(block_budget=5000)))
    assert fault.stage == "timeout" and "limit of 5000 executed blocks" in fault.message
    assert "3 threads, among them thread (0, 0, 0)" in fault.message and "k did not end" in fault.message
    fault = fault_of(lambda: run_cuda(source, ints(1), block=64, device=SimulatorDevice(time_limit=0.2)))
    assert fault.stage == "timeout" and "time limit" in fault.message


def test_a_loop_that_changes_nothing_ends_at_once() -> None:
    waits = 'extern "C" __global__ void k(volatile int* o) { if (threadIdx.x < 3) while (o[0] == 0) {} }'
    halves = """extern "C" __global__ void k(float* o) { float v = threadIdx.x; while (v < 1e30f) v = v * 0.5f - 1.0f;
        o[0] = v; }"""
    lock = 'extern "C" __global__ void k(int* o) { while (atomicCAS(o, 0, 1) != 0) {} __syncthreads(); o[0] = 0; }'
    for source, argument, threads in ((waits, ints(1), 3), (halves, torch.zeros(1), 64), (lock, ints(1), 63)):
        device = SimulatorDevice(block_budget=5000)
        fault = fault_of(lambda s=source, a=argument, d=device: run_cuda(s, a, block=64, device=d))
        assert fault.stage == "timeout" and "k never ends" in fault.message and "PTX lines" in fault.message
        assert f"{threads} threads, among them thread (" in fault.message


def test_a_loop_that_reads_the_clock_may_end() -> None:
    source = """extern "C" __global__ void k(int* o) { long long start = clock64();
        while (clock64() - start < 100000) {} o[threadIdx.x] = 5; }"""
    out = ints(32)
    run_cuda(source, out)
    assert out.tolist() == [5] * 32


def test_a_barrier_that_some_threads_never_reach() -> None:
    source = """extern "C" __global__ void k(int* o) { if (threadIdx.x < 32 || blockIdx.x == 0) {
        asm volatile("bar.sync 3, 64;" ::: "memory"); } else { asm volatile("bar.sync 4, 96;" ::: "memory"); }
        o[0] = 1; }"""
    fault = fault_of(lambda: run_cuda(source, ints(1), grid=2, block=64))
    assert fault.stage == "timeout"
    assert "barrier 3 is never complete: 32 of 64 threads arrived in block (1, 0, 0)" in fault.message
    assert "PTX line" in fault.message


def test_a_warp_instruction_that_misses_lanes() -> None:
    source = """extern "C" __global__ void k(int* o) { int t = threadIdx.x;
        if (t < 16) { o[t] = __shfl_sync(0xffffffff, t, 0); } else { asm volatile("bar.sync 1, 32;"); o[t] = 2; } }"""
    fault = fault_of(lambda: run_cuda(source, ints(32), block=32))
    assert fault.stage == "timeout"


def test_a_trap_and_a_failed_assertion() -> None:
    fault = fault_of(
        lambda: run_cuda('extern "C" __global__ void k(int* o) { if (threadIdx.x == 3) __trap(); }', ints(1))
    )
    assert fault.stage == "launch_error" and "trap was executed" in fault.message and "(3, 0, 0)" in fault.message


PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n) {
  .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [p];
  ld.param.u32 %r1, [n];
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra END;
  frobnicate.sync.aligned.u32 %r2, %r1;
END:
  st.global.u32 [%rd1], 5;
  ret;
}"""


def test_an_unknown_opcode_matters_only_when_it_is_executed() -> None:
    out = ints(1)
    run_ptx(PTX, out, 0)
    assert out.tolist() == [5]
    fault = fault_of(lambda: run_ptx(PTX, out, 1))
    assert fault.stage == "unsupported" and "frobnicate.sync.aligned.u32" in fault.message
    assert "PTX line 10" in fault.message


def test_a_launch_that_does_not_fit_its_kernel() -> None:
    fault = fault_of(lambda: run_ptx(PTX, ints(1)))
    assert fault.stage == "launch_error" and "parameters of [8, 4] bytes, the launch gives [8]" in fault.message
