"""State spaces, vector accesses, atomics and asynchronous copies."""

from __future__ import annotations

import numpy as np
import torch
from simulated import ptx_of, run_cuda, run_ptx

RNG = np.random.default_rng(20261201)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_atomics_serve_lanes_in_order() -> None:
    x = RNG.integers(0, 10, 5000).astype(np.int32)
    bins, ranks, sums = ints(16), ints(5000), torch.zeros(16)
    source = """extern "C" __global__ void k(int* o, const int* x, int* r, float* f, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) { r[i] = atomicAdd(&o[x[i]], 1);
        atomicMax(&o[12], x[i] * 3); atomicAdd(&f[x[i]], 0.5f); atomicXor(&o[13], i); atomicInc((unsigned*)&o[14], 6);
        atomicMin((long long*)&o[10], -(long long)i << 33); } }"""
    run_cuda(source, bins, torch.from_numpy(x), ranks, sums, 5000, grid=40, block=128)
    count = np.bincount(x, minlength=10)
    assert bins[:10].tolist() == count.tolist()
    assert sums[:10].tolist() == (count * 0.5).tolist()
    assert bins[12:15].tolist() == [27, int(np.bitwise_xor.reduce(np.arange(5000))), 5000 % 7]
    assert bins[10:12].view(torch.int64).tolist() == [-(4999 << 33)]
    seen = [0] * 10
    for value, rank in zip(x, ranks.tolist(), strict=True):
        assert rank == seen[value]
        seen[value] += 1


def test_atomics_in_shared_memory_and_of_packed_halves() -> None:
    source = """extern "C" __global__ void k(int* o, unsigned* h) { __shared__ unsigned s[4]; int t = threadIdx.x;
        if (t < 4) s[t] = 0; __syncthreads(); atomicAdd(&s[t & 3], t); atomicOr(&s[3], 1 << 20);
        unsigned one = 0x3c004000; // halves 2 and 1
        asm volatile("red.global.add.noftz.f16x2 [%0], %1;" :: "l"(h), "r"(one));
        unsigned b = 0x3f804000; // bf16 2 and 1
        asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" :: "l"(h + 1), "r"(b));
        __syncthreads(); if (t < 4) o[t] = s[t]; }"""
    out, halves = ints(4), ints(2)
    run_cuda(source, out, halves, block=64)
    sums = [sum(range(r, 64, 4)) for r in range(4)]
    # The bit is set by the first lane's turn of the second instruction, after all sums.
    assert out.tolist() == [*sums[:3], sums[3] | 1 << 20]
    assert halves[:1].view(torch.float16).tolist() == [128.0, 64.0]
    assert halves[1:].view(torch.bfloat16).tolist() == [128.0, 64.0]


def test_local_arrays_and_vector_accesses() -> None:
    x = RNG.standard_normal((256, 4)).astype(np.float32)
    source = """extern "C" __global__ void k(float4* o, const float4* x) { int t = threadIdx.x; float4 v = x[t];
        float a[4] = {v.x, v.y, v.z, v.w}; float b[4];
        for (int i = 0; i < 4; i++) b[(i + t) & 3] = a[i] * 2; o[t] = make_float4(b[0], b[1], b[2], b[3]); }"""
    assert ".local" in ptx_of(source)
    out = torch.zeros(256, 4)
    run_cuda(source, out, torch.from_numpy(x), block=256)
    assert np.array_equal(out.numpy(), np.stack([np.roll(2 * x[t], t & 3) for t in range(256)]))


def test_generic_addresses_reach_every_space_at_once() -> None:
    source = """__device__ int g[64] = {1, 2, 3}; __constant__ int c[4] = {10, 20, 30, 40};
        extern "C" __global__ void k(int* o) { __shared__ int s[64]; int l[4]; int t = threadIdx.x;
        s[t] = 1000 + t; for (int i = 0; i < 4; i++) l[i] = 2000 + t * i; __syncthreads();
        volatile int* p = t % 3 == 0 ? (volatile int*)&s[63 - t]
            : t % 3 == 1 ? (volatile int*)&l[t & 3] : (volatile int*)&g[t & 3];
        int v = *p; __syncthreads(); *p = v + 5; __syncthreads(); o[t] = v + c[t & 3] + *p * 10000; }"""
    out = ints(64)
    run_cuda(source, out, block=64)
    g, s = [1, 2, 3] + [0] * 61, [1000 + t for t in range(64)]
    before = [s[63 - t] if t % 3 == 0 else 2000 + t * (t & 3) if t % 3 == 1 else g[t & 3] for t in range(64)]
    want = [v + (10, 20, 30, 40)[t & 3] + (v + 5) * 10000 for t, v in enumerate(before)]
    assert out.tolist() == want


def test_parameters_are_read_by_value_and_by_index() -> None:
    source = """struct P { int a[6]; short h; char c; };
        extern "C" __global__ void k(int* o, P p) { int t = threadIdx.x; o[t] = p.a[t % 6] * 10 + p.h + p.c; }"""
    data = np.array([5, 6, 7, 8, 9, 10], np.int32).tobytes() + np.int16(-300).tobytes() + np.int8(-2).tobytes() + b"\0"
    out = ints(32)
    run_cuda(source, out, data, block=32)
    assert out.tolist() == [(5 + t % 6) * 10 - 302 for t in range(32)]


def test_narrow_loads_extend_and_narrow_stores_cut() -> None:
    source = """extern "C" __global__ void k(int* o, const signed char* a, const unsigned short* b, short* n) {
        int t = threadIdx.x; o[t] = a[t] * 1000 + b[t]; n[t] = (short)(t * 5000); }"""
    a, b = RNG.integers(-128, 128, 64).astype(np.int8), RNG.integers(0, 1 << 16, 64).astype(np.uint16)
    out, narrow = ints(64), torch.zeros(64, dtype=torch.int16)
    run_cuda(source, out, torch.from_numpy(a), torch.from_numpy(b.view(np.int16)), narrow, block=64)
    assert out.tolist() == (a.astype(int) * 1000 + b).tolist()
    assert narrow.tolist() == (np.arange(64) * 5000).astype(np.int16).tolist()


def test_asynchronous_copies_fill_with_zeros() -> None:
    source = """extern "C" __global__ void k(uint4* o, const uint4* x, int n) {
        extern __shared__ uint4 s[]; int t = threadIdx.x;
        unsigned a = (unsigned)__cvta_generic_to_shared(&s[t]); int bytes = t < n ? 16 : t == n ? 12 : 0;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
            :: "r"(a), "l"(x + (t <= n ? t : 0)), "r"(bytes));
        unsigned b = (unsigned)__cvta_generic_to_shared(&s[64 + t]);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(b), "l"(x + t));
        asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory"); __syncthreads();
        uint4 v = s[t ^ 1]; v.w += s[64 + (t ^ 1)].x; o[t] = v; }""".replace("uint4", "U").replace(
        'extern "C"', 'struct __align__(16) U { unsigned x, y, z, w; }; extern "C"'
    )
    x = RNG.integers(0, 1 << 30, (64, 4)).astype(np.int32)
    out = ints(64, 4)
    run_cuda(source, out, torch.from_numpy(x), 40, block=64, shared=2048)
    want = np.where(np.arange(64)[:, None] < 40, x, 0)
    want[40, :3] = x[40, :3]
    want[:, 3] += x[:, 0]
    assert np.array_equal(out.numpy(), want[np.arange(64) ^ 1])


def test_the_last_lane_wins_a_common_address() -> None:
    out = ints(2)
    run_cuda('extern "C" __global__ void k(int* o) { o[threadIdx.x & 1] = threadIdx.x; }', out, block=64)
    assert out.tolist() == [62, 63]


def test_128_bit_registers_and_packing() -> None:
    ptx = """.version 8.3
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
  .reg .b64 %rd<8>; .reg .b32 %r<8>; .reg .b16 %h<5>; .reg .b128 %q<2>;
  ld.param.u64 %rd1, [p];
  ld.global.v2.b64 {%rd2, %rd3}, [%rd1];
  mov.b128 %q1, {%rd3, %rd2};
  st.global.b128 [%rd1+16], %q1;
  mov.b64 {%h1, %h2, %h3, %h4}, %rd2;
  mov.b64 %rd4, {%h4, %h3, %h2, %h1};
  mov.b64 {%r1, _}, %rd3;
  mov.b32 {_, %h1}, %r1;
  mov.b32 %r2, {%h1, %h2};
  st.global.v2.b32 [%rd1], {%r1, %r2};
  st.global.b64 [%rd1+8], %rd4;
}"""
    x = torch.tensor([0x0004000300020001, 0x1122334455667788, 0, 0])
    run_ptx(ptx, x, block=1)
    low, high = 0x55667788, 0x0002_5566
    assert x.tolist() == [low | high << 32, 0x0001000200030004, 0x1122334455667788, 0x0004000300020001]


def test_memory_is_poisoned_before_it_is_written() -> None:
    out = ints(32)
    run_cuda(
        """extern "C" __global__ void k(int* o) { __shared__ int s[32];
        o[threadIdx.x] = ((volatile int*)s)[threadIdx.x]; }""",
        out,
    )
    assert out.tolist() == [-1] * 32
