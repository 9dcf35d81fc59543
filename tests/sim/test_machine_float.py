"""How instructions reach the floating-point functions: types, modifiers, packing, comparison. The functions themselves
have their own tests.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from simulated import run_cuda, run_ptx

RNG = np.random.default_rng(20261201)
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-40,
    3.4e38,
    2.5,
    -7.75,
    65504.0,
    1e-7,
    100.0,
    0.1,
]


def grid_of(values: list[float], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs."""
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    a, b = torch.meshgrid(x, x, indexing="ij")
    return a.reshape(-1).contiguous(), b.reshape(-1).contiguous()


def elementwise(body: str, kind: str, out: torch.Tensor, *inputs: torch.Tensor, registers: str = "") -> torch.Tensor:
    """Run ``body`` with %a, %b, %c loaded and %r stored, one element per thread."""
    size, result = inputs[0].element_size() * 8, out.element_size() * 8
    names = ["%a", "%b", "%c"][: len(inputs)]
    loads = "".join(
        f"ld.param.u64 %base, [p{i}]; mad.wide.u32 %at, %t, {size // 8}, %base; ld.global.b{size} {name}, [%at];"
        for i, name in enumerate(names)
    )
    ptx = f""".version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o, {", ".join(f".param .u64 p{i}" for i in range(len(inputs)))}) {{
  .reg .b64 %at, %base; .reg .b32 %t; .reg .{kind} {", ".join(names)}; .reg .b{result} %r; .reg .pred %p, %q;
  {registers}
  mov.u32 %t, %tid.x; {loads}
  {body}
  ld.param.u64 %base, [o]; mad.wide.u32 %at, %t, {result // 8}, %base; st.global.b{result} [%at], %r;
}}"""
    run_ptx(ptx, out, *inputs, block=len(inputs[0]))
    return out


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(((got == want) & (torch.signbit(got) == torch.signbit(want)) | got.isnan() & want.isnan()).all())


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_arithmetic_in_every_type(kind: str) -> None:
    dtype = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    a, b = grid_of(SPECIAL, dtype)
    register = f"b{a.element_size() * 8}"
    for opcode, want in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        assert same(elementwise(f"{opcode}.rn.{kind} %r, %a, %b;", register, torch.empty_like(a), a, b), want)
    fused = elementwise(f"fma.rn.{kind} %r, %a, %b, %a;", register, torch.empty_like(a), a, b)
    if kind != "f64":
        assert same(fused, (a.double() * b.double() + a.double()).to(dtype))
    negated = elementwise(f"neg.{kind} %r, %a;", register, torch.empty_like(a), a)
    assert same(negated, -a)
    small = elementwise(f"min.{kind} %r, %a, %b;", register, torch.empty_like(a), a, b)
    assert same(
        torch.where(a == b, a.abs(), small.where(a != b, a.abs())), torch.where(a == b, a.abs(), torch.fmin(a, b))
    )
    assert same(
        elementwise(f"max.NaN.{kind} %r, %a, %b;", register, torch.empty_like(a), a, b).abs(), torch.maximum(a, b).abs()
    )


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_halves(kind: str) -> None:
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    a, b = grid_of(SPECIAL, dtype)
    c = b.flip(0).contiguous()
    packed = [x.view(torch.int32) for x in (a, b, c)]
    out = elementwise(f"fma.rn.{kind} %r, %a, %b, %c;", "b32", torch.empty_like(packed[0]), *packed)
    assert same(out.view(dtype), (a.double() * b.double() + c.double()).to(dtype))
    out = elementwise(f"add.{kind} %r, %a, %b;", "b32", torch.empty_like(packed[0]), *packed)
    assert same(out.view(dtype), a + b)
    out = elementwise(f"abs.{kind} %r, %a;", "b32", torch.empty_like(packed[0]), *packed)
    assert same(out.view(dtype), a.abs())
    body = f"setp.gt.{kind} %p|%q, %a, %b; selp.b32 %r, 1, 0, %p; @%q add.s32 %r, %r, 2;"
    out = elementwise(body, "b32", torch.empty_like(packed[0]), *packed)
    greater = (a > b).view(-1, 2).int()
    assert out.tolist() == (greater[:, 0] + 2 * greater[:, 1]).tolist()


COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~a.isnan() & ~b.isnan(),
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | a.isnan() | b.isnan(),
    "neu": lambda a, b: a != b,
    "leu": lambda a, b: (a <= b) | a.isnan() | b.isnan(),
    "gtu": lambda a, b: (a > b) | a.isnan() | b.isnan(),
    "num": lambda a, b: ~a.isnan() & ~b.isnan(),
    "nan": lambda a, b: a.isnan() | b.isnan(),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_know_nan(name: str) -> None:
    a, b = grid_of(SPECIAL, torch.float32)
    want = COMPARISONS[name](a, b).int()
    out = torch.zeros(len(a), dtype=torch.int32)
    assert (
        elementwise(f"setp.{name}.f32 %p, %a, %b; selp.s32 %r, 1, 0, %p;", "f32", out, a, b).tolist() == want.tolist()
    )
    body = f"setp.gt.f32 %q, %a, 0f00000000; setp.{name}.and.f32 %p|%q, %a, %b, !%q; selp.s32 %r, 1, 0, %p;"
    body += "@%q add.s32 %r, %r, 2;"
    positive = (a > 0).int()
    expected = want * (1 - positive) + 2 * (1 - want) * (1 - positive)
    assert elementwise(body, "f32", out, a, b).tolist() == expected.tolist()
    assert elementwise(f"set.{name}.u32.f32 %r, %a, %b;", "f32", out, a, b).tolist() == (-want).tolist()


def test_integer_comparisons_differ_by_sign() -> None:
    a, b = grid_of([0, 1, -1, 2**31 - 1, -(2**31), 7], torch.int32)
    out = torch.zeros(len(a), dtype=torch.int32)
    assert (
        elementwise("setp.lt.s32 %p, %a, %b; selp.s32 %r, 1, 0, %p;", "b32", out, a, b).tolist()
        == (a < b).int().tolist()
    )
    u, v = a.long() % 2**32, b.long() % 2**32
    for opcode in ("setp.lt.u32", "setp.lo.u32"):
        assert (
            elementwise(f"{opcode} %p, %a, %b; selp.s32 %r, 1, 0, %p;", "b32", out, a, b).tolist()
            == (u < v).int().tolist()
        )


def test_modifiers() -> None:
    a, b = grid_of(SPECIAL, torch.float32)
    flushed = torch.where(a.abs() < 2.0**-126, a * 0, a)
    assert same(elementwise("add.ftz.f32 %r, %a, 0f80000000;", "f32", torch.empty_like(a), a), flushed)
    limited = elementwise("add.sat.f32 %r, %a, %b;", "f32", torch.empty_like(a), a, b)
    assert torch.equal(limited, torch.nan_to_num((a + b).clamp(0, 1), nan=0.0))
    up = elementwise("add.rp.f32 %r, %a, %b;", "f32", torch.empty_like(a), a, b)
    down = elementwise("add.rm.f32 %r, %a, %b;", "f32", torch.empty_like(a), a, b)
    finite = (a.isfinite() & b.isfinite()) & (a + b).isfinite()
    exact = (a.double() + b.double())[finite]
    assert (up[finite].double() >= exact).all() and (down[finite].double() <= exact).all()
    assert (up[finite] > down[finite]).any()


def test_functions_of_the_special_function_unit() -> None:
    x = torch.from_numpy(RNG.uniform(0.01, 30, 256).astype(np.float32))
    wide = x.double()
    for opcode, want in {
        "rsqrt.approx.ftz.f32": wide.rsqrt(),
        "rcp.approx.ftz.f32": 1 / wide,
        "sqrt.approx.f32": wide.sqrt(),
        "ex2.approx.ftz.f32": torch.exp2(wide),
        "lg2.approx.f32": torch.log2(wide),
        "sin.approx.f32": wide.sin(),
        "tanh.approx.f32": wide.tanh(),
    }.items():
        got = elementwise(f"{opcode} %r, %a;", "f32", torch.empty_like(x), x)
        assert torch.allclose(got.double(), want, rtol=2e-7, atol=1e-7), opcode
    got = elementwise("div.full.f32 %r, %a, 0f40400000;", "f32", torch.empty_like(x), x)
    assert torch.allclose(got, x / 3, rtol=3e-7)


def test_conversions_between_registers() -> None:
    x = torch.from_numpy(RNG.normal(0, 1000, 256).astype(np.float32))
    narrow = torch.empty(256, dtype=torch.bfloat16)
    assert torch.equal(elementwise("cvt.rn.bf16.f32 %r, %a;", "f32", narrow, x), x.bfloat16())
    packed = elementwise("cvt.rn.bf16x2.f32 %r, %a, %b;", "f32", torch.empty(256, dtype=torch.int32), x, -x)
    assert torch.equal(packed.view(torch.bfloat16).view(-1, 2), torch.stack((-x, x), 1).bfloat16())
    integers = elementwise("cvt.rzi.s32.f32 %r, %a;", "f32", torch.empty(256, dtype=torch.int32), x)
    assert torch.equal(integers, x.int())
    small = elementwise("cvt.sat.s8.s32 %r, %a;", "b32", torch.empty(256, dtype=torch.int32), integers)
    assert torch.equal(small, integers.clamp(-128, 127))
    fp8 = elementwise("cvt.rn.satfinite.e4m3x2.f32 %r, %a, %b;", "f32", torch.empty(256, dtype=torch.int16), x / 8, x)
    want = torch.stack((x.clamp(-448, 448), (x / 8).clamp(-448, 448)), 1).to(torch.float8_e4m3fn)
    assert torch.equal(fp8.view(torch.float8_e4m3fn).view(-1, 2).float(), want.float())


def test_division_and_mathematics_of_cuda_c() -> None:
    """Subroutines that NVRTC inlines: exact division, square root, double precision, sinf with its slow path."""
    x = torch.from_numpy(RNG.normal(0, 3, 256))
    y = torch.from_numpy(RNG.normal(0, 3, 256))
    out, single = torch.zeros(3, 256, dtype=torch.float64), torch.zeros(4, 256)
    source = """extern "C" __global__ void k(double* o, float* f, const double* x, const double* y) {
        int t = threadIdx.x;
        o[t] = x[t] / y[t]; o[256 + t] = sqrt(fabs(x[t])); o[512 + t] = exp(x[t]) + pow(fabs(x[t]), y[t]);
        float a = x[t], b = y[t]; f[t] = a / b; f[256 + t] = sqrtf(fabsf(a)); f[512 + t] = sinf(a * 200000.0f);
        f[768 + t] = expf(a) + log1pf(fabsf(b)) + erff(a); }"""
    run_cuda(source, out, single, x, y, block=256)
    a, b = x.float(), y.float()
    assert torch.equal(out[0], x / y) and np.array_equal(out[1].numpy(), np.sqrt(np.abs(x.numpy())))
    assert torch.allclose(out[2], x.exp() + x.abs() ** y, rtol=1e-13)
    assert torch.equal(single[0], a / b) and np.array_equal(single[1].numpy(), np.sqrt(a.abs().numpy()))
    assert torch.allclose(single[2].double(), (a * 200000.0).double().sin(), atol=1e-6)
    want = a.double().exp() + b.double().abs().log1p() + a.double().erf()
    assert torch.allclose(single[3].double(), want, rtol=1e-6, atol=1e-6)


def test_sign_and_class() -> None:
    a, b = grid_of(SPECIAL, torch.float32)
    got = elementwise("copysign.f32 %r, %a, %b;", "f32", torch.empty_like(a), a, b)
    assert same(got.where(~b.isnan(), b), torch.copysign(b, a).where(~b.isnan(), b))
    out = torch.zeros(len(a), dtype=torch.int32)
    got = elementwise("testp.subnormal.f32 %p, %a; selp.s32 %r, 1, 0, %p;", "f32", out, a)
    assert got.tolist() == ((a != 0) & (a.abs() < 2.0**-126)).int().tolist()
    got = elementwise("testp.finite.f32 %p, %a; selp.s32 %r, 1, 0, %p;", "f32", out, a)
    assert got.tolist() == a.isfinite().int().tolist()
