"""Divergence, loops, calls, jump tables, barriers and locks, in CUDA C compiled by NVRTC."""

from __future__ import annotations

import numpy as np
import torch
from simulated import ptx_of, run_cuda, run_ptx

RNG = np.random.default_rng(20261201)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def collatz(value: int) -> int:
    steps = 0
    while value != 1:
        value = value // 2 if value % 2 == 0 else 3 * value + 1
        steps += 1
    return steps


def test_divergent_loops_end_lane_by_lane() -> None:
    x = RNG.integers(1, 10000, 1000).astype(np.int32)
    out = ints(1000)
    source = """extern "C" __global__ void k(int* o, const int* x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return;
        int v = x[i], c = 0; while (v != 1) { if (v & 1) v = 3 * v + 1; else v /= 2; c++; } o[i] = c; }"""
    run_cuda(source, out, torch.from_numpy(x), 1000, grid=8, block=128)
    assert out.tolist() == [collatz(int(v)) for v in x]


def test_nested_divergence_reconverges() -> None:
    source = """extern "C" __global__ void k(int* o) { int t = threadIdx.x, v = t;
        for (int i = 0; i < t % 7; i++) { if ((t + i) % 3 == 0) { if (t & 1) v += 5; else { v ^= i;
        if (v > 40) continue; } }
            for (int j = t % 5; j < 4; j++) { if (j == 2 && v % 2) break; v = v * 3 + j; } v %= 1009; }
        __syncthreads(); o[t] = v + __popc(__ballot_sync(-1, v & 1)); }"""
    out = ints(96)
    run_cuda(source, out, block=96)
    values = []
    for t in range(96):
        v = t
        for i in range(t % 7):
            skip = False
            if (t + i) % 3 == 0:
                if t & 1:
                    v += 5
                else:
                    v ^= i
                    skip = v > 40
            if skip:
                continue
            for j in range(t % 5, 4):
                if j == 2 and v % 2:
                    break
                v = v * 3 + j
            v %= 1009
        values.append(v)
    votes = [sum(v & 1 for v in values[w : w + 32]) for w in range(0, 96, 32)]
    assert out.tolist() == [v + votes[t // 32] for t, v in enumerate(values)]


def test_a_jump_table_sends_lanes_to_many_places() -> None:
    ptx = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
  .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, %tid.x;
  rem.u32 %r2, %r1, 4;
$table: .branchtargets $A, $B, $C, $A;
  brx.idx %r2, $table;
$A: mov.u32 %r3, 10; bra $END;
$B: mul.lo.u32 %r3, %r1, %r1; bra $END;
$C: setp.gt.u32 %p1, %r1, 30; @%p1 exit; sub.u32 %r3, %r1, 7;
$END:
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r3;
  ret;
}"""
    out = ints(64)
    run_ptx(ptx, out, block=64)
    want = [(10, t * t, 0 if t > 30 else t - 7, 10)[t % 4] for t in range(64)]
    assert out.tolist() == want


def test_device_functions_are_called() -> None:
    source = """struct S { float a; int b; double c; };
        __device__ __noinline__ float f(float a, int b) { if (b & 1) return a * 2; return a + b; }
        __device__ __noinline__ S g(S s, int t) { s.a = f(s.a, t) + 1; s.b += t; s.c *= 2; return s; }
        extern "C" __global__ void k(float* o) { int t = threadIdx.x; S s = {1.5f * t, t, 0.25};
            s = g(s, t); s = g(s, t + 1); o[t] = s.a + s.b + (float)s.c; }"""
    assert "call.uni" in ptx_of(source)
    out = torch.zeros(64)
    run_cuda(source, out, block=64)

    def f(a: float, b: int) -> float:
        return a * 2 if b & 1 else a + b

    def g(a: float, b: int, c: float, t: int) -> tuple[float, int, float]:
        return f(a, t) + 1, b + t, c * 2

    assert out.tolist() == [sum(g(*g(1.5 * t, t, 0.25, t), t + 1)) for t in range(64)]


def test_tree_reduction_in_shared_memory() -> None:
    x = RNG.integers(-1000, 1000, (7, 256)).astype(np.int32)
    source = """extern "C" __global__ void k(int* o, const int* x) { __shared__ int s[256]; int t = threadIdx.x;
        s[t] = x[blockIdx.x * 256 + t]; __syncthreads();
        for (int d = 128; d > 0; d /= 2) { if (t < d) s[t] += s[t + d]; __syncthreads(); }
        if (t == 0) o[blockIdx.x] = s[0]; }"""
    out = ints(7)
    run_cuda(source, out, torch.from_numpy(x), grid=7, block=256)
    assert out.tolist() == x.sum(axis=1).tolist()


def test_barrier_reductions() -> None:
    source = """extern "C" __global__ void k(int* o) { int t = threadIdx.x, b = blockIdx.x;
        o[b * 50 + t] = __syncthreads_count(t % 3 == b) * 4 + __syncthreads_and(t < 50 - b) * 2
            + __syncthreads_or(t == 49 + b); }"""
    out = ints(2, 50)
    run_cuda(source, out, grid=2, block=50)
    assert out[0].tolist() == [17 * 4 + 2 + 1] * 50
    assert out[1].tolist() == [17 * 4] * 50


def test_named_barriers_hand_data_from_producers_to_consumers() -> None:
    """The first warp fills a slot and arrives; the second waits, reads, and gives the slot back."""
    source = """extern "C" __global__ void k(int* o) { __shared__ int s[32]; int t = threadIdx.x & 31;
        if (threadIdx.x < 32) { for (int i = 0; i < 5; i++) {
                if (i) asm volatile("bar.sync 2, 64;" ::: "memory");
                s[t] = i * 100 + t; asm volatile("bar.arrive 1, 64;" ::: "memory"); } }
        else { int sum = 0; for (int i = 0; i < 5; i++) { asm volatile("bar.sync 1, 64;" ::: "memory");
                sum += s[31 - t]; if (i < 4) asm volatile("bar.arrive 2, 64;" ::: "memory"); }
            o[blockIdx.x * 32 + t] = sum; } }"""
    out = ints(3, 32)
    run_cuda(source, out, grid=3, block=64)
    assert out.tolist() == [[1000 + 5 * (31 - t) for t in range(32)]] * 3


def test_threads_that_have_ended_do_not_hold_a_barrier() -> None:
    source = """extern "C" __global__ void k(int* o) { __shared__ int s; if (threadIdx.x >= 64) return;
        if (threadIdx.x == 0) s = 7; __syncthreads(); o[threadIdx.x] = s; }"""
    out = ints(64)
    run_cuda(source, out, block=128)
    assert out.tolist() == [7] * 64


def test_a_lock_is_passed_on_within_and_between_blocks() -> None:
    source = """extern "C" __global__ void k(int* o) { bool done = false; while (!done) {
        if (atomicCAS(&o[0], 0, 1) == 0) { o[1] += threadIdx.x; __threadfence(); atomicExch(&o[0], 0); done = true;
        } } }"""
    out = ints(2)
    run_cuda(source, out, grid=4, block=32)
    assert out.tolist() == [0, 4 * sum(range(32))]


def test_a_lane_that_spins_lets_the_other_one_go_on() -> None:
    """Thread 0 waits at a lower program counter than thread 32's store."""
    source = """extern "C" __global__ void k(volatile int* o) { if (threadIdx.x == 0) { while (o[1] == 0) {} o[0] = 5; }
        else if (threadIdx.x == 32) o[1] = 1; }"""
    out = ints(2)
    run_cuda(source, out, block=64)
    assert out.tolist() == [5, 1]


def test_a_grid_barrier_in_a_cooperative_launch() -> None:
    source = """extern "C" __global__ void k(int* o, int* c) { atomicAdd(&o[0], threadIdx.x); __syncthreads();
        if (threadIdx.x == 0) { __threadfence(); atomicAdd(c, 1); while (*(volatile int*)c < gridDim.x) {} }
        __syncthreads(); o[1 + blockIdx.x] = *(volatile int*)o; }"""
    out, counter = ints(301), ints(1)
    run_cuda(source, out, counter, grid=300, block=96, cooperative=True)
    assert out.tolist() == [300 * sum(range(96))] * 301


def test_blocks_of_partial_warps_and_three_dimensions() -> None:
    source = """extern "C" __global__ void k(int* o) {
        int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        o[b * 105 + t] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z
            + 1000 * (blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z) + __popc(__activemask()) * 1000000; }"""
    out = ints(2, 3, 2, 3, 5, 7)
    run_cuda(source, out, grid=(2, 3, 2), block=(7, 5, 3))
    bz, by, bx, z, y, x = np.indices((2, 3, 2, 3, 5, 7))
    warp = (x + 7 * (y + 5 * z)) // 32
    active = np.where(warp == 3, 105 - 96, 32)
    want = x + 10 * y + 100 * z + 1000 * (bx + 10 * by + 100 * bz) + 1000000 * active
    assert np.array_equal(out.numpy(), want)


def test_guarded_instructions_keep_the_other_lanes() -> None:
    source = """extern "C" __global__ void k(int* o) { int t = threadIdx.x, v = t;
        asm volatile("{ .reg .pred p; setp.gt.s32 p, %1, 9; @p add.s32 %0, %0, 100; @!p mul.lo.s32 %0, %0, 3;"
            "@p st.global.b32 [%2], 77; }" : "+r"(v) : "r"(t), "l"(o + 64 + t)); o[t] = v; }"""
    out = ints(128)
    run_cuda(source, out, block=64)
    assert out[:64].tolist() == [t + 100 if t > 9 else 3 * t for t in range(64)]
    assert out[64:].tolist() == [77 if t > 9 else 0 for t in range(64)]


def test_labels_of_inlined_assembly_belong_to_their_braces() -> None:
    ptx = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
  .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, 0;
  { .reg .pred q; .reg .b32 %r1x;
  AGAIN: add.u32 %r1, %r1, 3; setp.lt.u32 q, %r1, 10; @q bra AGAIN; bra DONE; DONE: }
  { .reg .pred q;
  AGAIN: add.u32 %r1, %r1, 100; setp.lt.u32 q, %r1, 500; @q bra AGAIN; bra DONE; DONE: }
  st.global.u32 [%rd1], %r1;
  ret;
}"""
    out = ints(1)
    run_ptx(ptx, out)
    assert out.tolist() == [512]


def test_a_spinning_lane_at_the_lowest_program_counter_does_not_starve_the_others() -> None:
    ptx = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o) {
  .reg .b64 %base; .reg .b32 %t, %v; .reg .pred %p;
  mov.u32 %t, %tid.x; ld.param.u64 %base, [o];
  setp.ge.u32 %p, %t, 32; @%p bra LATER;
WAIT: ld.volatile.global.u32 %v, [%base+4]; setp.eq.u32 %p, %v, 0; @%p bra WAIT;
  st.global.b32 [%base], 5; exit;
LATER: st.global.b32 [%base+4], 7;
}"""
    out = ints(2)
    run_ptx(ptx, out, block=64)
    assert out.tolist() == [5, 7]


def test_mbarriers_hand_data_through_a_ring() -> None:
    """One producer warp, two consumer warps, two slots: full and empty barriers with parities, as in a TMA pipeline."""
    source = """__device__ void wait(unsigned b, unsigned parity) {
            asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D;"
                "bra L; D: }"
                :: "r"(b), "r"(parity) : "memory"); }
        __device__ void arrive(unsigned b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(b) : "memory"); }
        extern "C" __global__ void k(int* o) { __shared__ long long bar[4]; __shared__ int data[2][32];
            int t = threadIdx.x; unsigned full = (unsigned)__cvta_generic_to_shared(bar), empty = full + 16, l = t % 32;
            if (t < 2) { asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(full + 8 * t) : "memory");
                asm volatile("mbarrier.init.shared.b64 [%0], 64;" :: "r"(empty + 8 * t) : "memory"); }
            __syncthreads();
            if (t < 32) for (int i = 0; i < 7; i++) { int s = i % 2; wait(empty + 8 * s, (i / 2 + 1) % 2);
                data[s][l] = i * 100 + l + blockIdx.x; arrive(full + 8 * s); }
            else { int sum = 0; for (int i = 0; i < 7; i++) { int s = i % 2; wait(full + 8 * s, i / 2 % 2);
                sum += data[s][31 - l] * (t < 64 ? 1 : 2); arrive(empty + 8 * s); }
                o[blockIdx.x * 64 + t - 32] = sum; } }"""
    out = ints(3, 64)
    run_cuda(source, out, grid=3, block=96)
    want = [[(2100 + 7 * (31 - t % 32 + b)) * (1 + t // 32) for t in range(64)] for b in range(3)]
    assert out.tolist() == want


def test_transaction_bytes_hold_an_mbarrier() -> None:
    source = """extern "C" __global__ void k(int* o) { __shared__ long long bar; int t = threadIdx.x; unsigned p[4];
        unsigned b = (unsigned)__cvta_generic_to_shared(&bar);
        if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(b) : "memory");
        __syncthreads(); long long state;
        #define TEST(x) asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0;" \
                "selp.u32 %0, 1, 0, p; }" \
            : "=r"(x) : "r"(b) : "memory")
        TEST(p[0]);
        if (t == 0) asm volatile("mbarrier.arrive.expect_tx.shared.b64 %0, [%1], 4096;"
            : "=l"(state) : "r"(b) : "memory");
        __syncthreads(); TEST(p[1]); __syncthreads();
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 64;" :: "r"(b) : "memory");
        __syncthreads(); TEST(p[2]);
        asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(p[3]) : "r"(b), "l"(state) : "memory");
        o[t] = p[0] + 10 * p[1] + 100 * p[2] + 1000 * (t ? 1 : p[3]); }"""
    out = ints(64)
    run_cuda(source, out, block=64)
    assert out.tolist() == [1100] * 64
