"""Shuffles, votes and matrix instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated import run_cuda, run_ptx

from mkb_env.devices.simulator import machine

RNG = np.random.default_rng(20261201)
LANES = np.arange(32)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_shuffles() -> None:
    x = RNG.integers(0, 1 << 30, 96).astype(np.int32)
    out = ints(4, 96)
    source = """extern "C" __global__ void k(int* o, const int* x) { int t = threadIdx.x, v = x[t], n = 96;
        o[t] = __shfl_down_sync(-1, v, 3); o[n + t] = __shfl_up_sync(-1, v, 5, 16);
        o[2 * n + t] = __shfl_xor_sync(-1, v, 7, 8); o[3 * n + t] = __shfl_sync(-1, v, t * 7, 32); }"""
    run_cuda(source, out, torch.from_numpy(x), block=96)
    warps = x.reshape(3, 32)

    def moved(source: np.ndarray) -> list[int]:
        return np.take_along_axis(warps, np.broadcast_to(source, warps.shape), 1).ravel().tolist()

    assert out[0].tolist() == moved(np.where(LANES + 3 < 32, LANES + 3, LANES))
    assert out[1].tolist() == moved(np.where(LANES % 16 >= 5, LANES - 5, LANES))
    assert out[2].tolist() == moved(LANES ^ 7)
    assert out[3].tolist() == [warps[w][(lane + 32 * w) * 7 % 32] for w in range(3) for lane in range(32)]


def test_the_predicate_of_a_shuffle_tells_who_is_inside() -> None:
    source = """extern "C" __global__ void k(int* o) { int t = threadIdx.x, v;
        asm volatile("{ .reg .pred p; shfl.sync.up.b32 %0|p, %1, 4, 0x1800, -1; selp.s32 %0, %0, -1, p; }"
            : "=r"(v) : "r"(t));
        o[t] = v; }"""
    out = ints(32)
    run_cuda(source, out)
    assert out.tolist() == [t - 4 if t % 8 >= 4 else -1 for t in range(32)]


def test_votes_and_reductions() -> None:
    x = RNG.integers(0, 1 << 30, 96).astype(np.int32)
    out = ints(6, 96)
    source = """extern "C" __global__ void k(int* o, const int* x) { int t = threadIdx.x, v = x[t], n = 96;
        o[t] = __ballot_sync(-1, v & 1); o[n + t] = __all_sync(-1, v > 5) + 2 * __any_sync(-1, v < (1 << 26));
        o[2 * n + t] = __reduce_add_sync(-1, v); o[3 * n + t] = __reduce_max_sync(-1, v - (1 << 29));
        o[4 * n + t] = __match_any_sync(-1, v & 3); int p;
        o[5 * n + t] = __match_all_sync(-1, t < 64 ? 5 : v, &p) ^ p; }"""
    run_cuda(source, out, torch.from_numpy(x), block=96)
    warps = x.reshape(3, 32)
    bits = ((warps & 1).astype(np.uint32) << LANES.astype(np.uint32)).sum(axis=1, dtype=np.uint32)
    assert out[0].numpy().view(np.uint32).tolist() == np.repeat(bits, 32).tolist()
    assert out[1].tolist() == np.repeat((warps > 5).all(1) + 2 * (warps < (1 << 26)).any(1), 32).tolist()
    assert out[2].tolist() == np.repeat(warps.sum(1).astype(np.int32), 32).tolist()
    assert out[3].tolist() == np.repeat(warps.max(1) - (1 << 29), 32).tolist()
    same = [sum(1 << j for j in range(32) if (w[i] ^ w[j]) & 3 == 0) for w in warps for i in range(32)]
    assert out[4].numpy().view(np.uint32).tolist() == same
    assert out[5].tolist() == [~1] * 64 + [0] * 32


def test_lanes_that_took_another_path_are_left_out() -> None:
    source = """extern "C" __global__ void k(int* o) { int t = threadIdx.x, v = 0;
        if (t % 3 == 0) { unsigned m = __activemask(); v = __ballot_sync(m, t & 1); }
        else if (t % 3 == 1) { unsigned m = __activemask(); v = __shfl_sync(m, t, 4) + 100 * __popc(m); }
        else { unsigned p; asm volatile("{ .reg .pred q; elect.sync _|q, %1; selp.u32 %0, 1, 0, q; }"
            : "=r"(p) : "r"(__activemask()));
               v = p; } o[t] = v; }"""
    out = ints(64)
    run_cuda(source, out, block=64)
    want = []
    for t in range(64):
        warp = range(t // 32 * 32, t // 32 * 32 + 32)
        if t % 3 == 0:
            ballot = sum(1 << (s % 32) for s in warp if s % 3 == 0 and s & 1)
            want.append(ballot - (1 << 32) if ballot >> 31 else ballot)
        elif t % 3 == 1:
            # Lane 4 reads itself in the first warp; in the second, lane 4 is thread 36, which is elsewhere: 0.
            want.append((4 if t < 32 else 0) + 100 * sum(s % 3 == 1 for s in warp))
        else:
            want.append(int(t == min(s for s in warp if s % 3 == 2)))
    assert out.tolist() == want


def test_matrix_product_by_ldmatrix_and_mma() -> None:
    a = torch.from_numpy(RNG.normal(size=(2, 16, 16)).astype(np.float32)).bfloat16()
    b = torch.from_numpy(RNG.normal(size=(2, 16, 8)).astype(np.float32)).bfloat16()
    c = torch.from_numpy(RNG.normal(size=(2, 16, 8)).astype(np.float32))
    out = torch.zeros(2, 16, 8)
    source = """extern "C" __global__ void k(float* o, const short* a, const short* b, const float* c) {
        __shared__ __align__(16) short sa[2][256], sb[2][128]; int w = threadIdx.x / 32, l = threadIdx.x % 32;
        for (int i = l; i < 256; i += 32) sa[w][i] = a[w * 256 + i];
        for (int i = l; i < 128; i += 32) sb[w][i] = b[w * 128 + i];
        __syncwarp();
        unsigned pa = (unsigned)__cvta_generic_to_shared(&sa[w][(l % 16) * 16 + l / 16 * 8]);
        unsigned pb = (unsigned)__cvta_generic_to_shared(&sb[w][(l % 16) * 8]);
        unsigned x0, x1, x2, x3, y0, y1; int r = l / 4, q = l % 4 * 2;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3) : "r"(pa));
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(y0), "=r"(y1) : "r"(pb));
        const float* cw = c + w * 128; float* ow = o + w * 128; float d0, d1, d2, d3;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
            " {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3) : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(y0), "r"(y1),
              "f"(cw[r * 8 + q]), "f"(cw[r * 8 + q + 1]), "f"(cw[(r + 8) * 8 + q]), "f"(cw[(r + 8) * 8 + q + 1]));
        ow[r * 8 + q] = d0; ow[r * 8 + q + 1] = d1; ow[(r + 8) * 8 + q] = d2; ow[(r + 8) * 8 + q + 1] = d3; }"""
    run_cuda(source, out, a.view(torch.int16), b.view(torch.int16), c, block=64)
    want = a.double() @ b.double() + c.double()
    assert (out.double() - want).abs().max() < 1e-6


def test_stmatrix_and_movmatrix() -> None:
    source = """extern "C" __global__ void k(short* o) { __shared__ __align__(16) short s[256]; int l = threadIdx.x;
        unsigned v = l | (l + 100) << 16, m;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(m) : "r"(v));
        unsigned p = (unsigned)__cvta_generic_to_shared(&s[l % 16 * 8]);
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" :: "r"(p), "r"(v), "r"(m) : "memory");
        __syncwarp(); for (int i = l; i < 128; i += 32) o[i] = s[i]; }"""
    out = torch.zeros(2, 8, 8, dtype=torch.int16)
    run_cuda(source, out)
    first = torch.tensor([[4 * r + c // 2 + 100 * (c % 2) for c in range(8)] for r in range(8)], dtype=torch.int16)
    assert torch.equal(out[0], first) and torch.equal(out[1], first.T)


def test_lanes_that_come_late_meet_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that have left the loop get a turn out of fairness, and wait at the shuffle for the others."""
    monkeypatch.setattr(machine, "FAIRNESS", 1)
    ptx = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o, .param .u64 x) {
  .reg .b64 %at, %base; .reg .b32 %t, %v, %c, %w; .reg .pred %p;
  mov.u32 %t, %tid.x; mov.u32 %c, 0;
  ld.param.u64 %base, [x]; mad.wide.u32 %at, %t, 4, %base; ld.global.b32 %v, [%at];
LOOP: setp.eq.u32 %p, %v, 1; @%p bra END;
  add.u32 %c, %c, 1; and.b32 %w, %v, 1; setp.eq.u32 %p, %w, 1; @%p bra ODD;
  shr.u32 %v, %v, 1; bra LOOP;
ODD: mad.lo.u32 %v, %v, 3, 1; bra LOOP;
END: shfl.sync.bfly.b32 %w, %c, 5, 31, -1;
  ld.param.u64 %base, [o]; mad.wide.u32 %at, %t, 4, %base; st.global.b32 [%at], %w;
}"""
    x = RNG.integers(1, 1 << 16, 32).astype(np.int32)
    out = ints(32)
    run_ptx(ptx, out, torch.from_numpy(x), block=32)
    steps = []
    for v in x.tolist():
        steps.append(0)
        while v != 1:
            v = v * 3 + 1 if v & 1 else v >> 1
            steps[-1] += 1
    assert out.tolist() == [steps[t ^ 5] for t in range(32)]
