"""Integer instructions against Python's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from simulated import run_ptx

RNG = np.random.default_rng(20261201)
N = 192


def operands(width: int) -> list[int]:
    """Random and awkward bit patterns."""
    edge = [
        0,
        1,
        2,
        3,
        (1 << width) - 1,
        1 << (width - 1),
        (1 << (width - 1)) - 1,
        (1 << (width - 1)) + 1,
        5,
        1 << (width // 2),
    ]
    random = [int.from_bytes(RNG.bytes(width // 8), "little") for _ in range(N - 2 * len(edge))]
    return edge + random + edge[::-1]


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def evaluate(opcode: str, kinds: str, width: int, *columns: list[int], out: int = 0) -> list[int]:
    """Run ``opcode d, a, b, ...`` on columns of operands; ``kinds`` gives operand widths as letters h, w, d, p."""
    sizes = {"h": 2, "w": 4, "d": 8}
    out = out or width
    names = ["%" + "abcd"[i] for i in range(len(columns))]
    declared = "".join(f".reg .b{8 * sizes[k]} {name};" for name, k in zip(names, kinds, strict=True))
    loads = "".join(
        f"mad.wide.u32 %at, %t, {sizes[k]}, 0; ld.param.u64 %base, [p{i}]; add.u64 %at, %at, %base;"
        f"ld.global.b{8 * sizes[k]} {name}, [%at];"
        for i, (name, k) in enumerate(zip(names, kinds, strict=True))
    )
    params = ", ".join(f".param .u64 p{i}" for i in range(len(columns)))
    ptx = f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o, {params}) {{
  .reg .b64 %at, %base; .reg .b32 %t; .reg .b{out} %r; {declared}
  mov.u32 %t, %tid.x;
  {loads}
  {opcode} %r, {", ".join(names)};
  mad.wide.u32 %at, %t, {out // 8}, 0; ld.param.u64 %base, [o]; add.u64 %at, %at, %base;
  st.global.b{out} [%at], %r;
}}"""
    torch_type = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    numpy_type = {2: np.int16, 4: np.int32, 8: np.int64}
    tensors = [
        torch.from_numpy(np.array([signed(v, 8 * sizes[k]) for v in column], numpy_type[sizes[k]]))
        for column, k in zip(columns, kinds, strict=True)
    ]
    result = torch.zeros(N, dtype=torch_type[out // 8])
    run_ptx(ptx, result, *tensors, block=N)
    return [value & ((1 << out) - 1) for value in result.tolist()]


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def reference(opcode: str, width: int) -> Callable[..., int]:
    mask = (1 << width) - 1

    def s(value: int) -> int:
        return signed(value, width)

    return {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "mul.hi.u": lambda a, b: a * b >> width,
        "mul.hi.s": lambda a, b: s(a) * s(b) >> width,
        "div.u": lambda a, b: a // b if b else mask,
        "div.s": lambda a, b: trunc_div(s(a), s(b)) if b else mask,
        "rem.u": lambda a, b: a % b if b else a,
        "rem.s": lambda a, b: s(a) - trunc_div(s(a), s(b)) * s(b) if b else a,
        "min.s": lambda a, b: min(s(a), s(b)),
        "max.u": lambda a, b: max(a, b),
        "and": lambda a, b: a & b,
        "xor": lambda a, b: a ^ b,
    }[opcode]


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize(
    "opcode",
    [
        "add",
        "sub",
        "mul.lo",
        "mul.hi.u",
        "mul.hi.s",
        "div.u",
        "div.s",
        "rem.u",
        "rem.s",
        "min.s",
        "max.u",
        "and",
        "xor",
    ],
)
def test_two_operands(opcode: str, width: int) -> None:
    a, b = operands(width), [operands(width)[i] for i in RNG.permutation(N)]
    name, _, sign = opcode.rpartition(".") if opcode[-2:] in (".u", ".s") else (opcode, "", "u")
    kind = f"b{width}" if name in ("and", "xor") else f"{sign}{width}"
    got = evaluate(f"{name}.{kind}", {16: "hh", 32: "ww", 64: "dd"}[width], width, a, b)
    want = reference(opcode, width)
    assert got == [want(x, y) & ((1 << width) - 1) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("opcode", ["shl.b", "shr.u", "shr.s"])
def test_shifts_clamp_their_amount(opcode: str, width: int) -> None:
    a = operands(width)
    b = [int(v) for v in RNG.integers(0, width + 8, N - 2)] + [0xFFFFFFFF, 1 << 31]
    got = evaluate(f"{opcode}{width}", {16: "hw", 32: "ww", 64: "dw"}[width], width, a, b)

    def want(x: int, y: int) -> int:
        y = min(y, width)
        return x << y if opcode == "shl.b" else signed(x, width) >> y if opcode == "shr.s" else x >> y

    assert got == [want(x, y) & ((1 << width) - 1) for x, y in zip(a, b, strict=True)]


def test_wide_products_and_multiply_add() -> None:
    a, b, c = operands(32), [operands(32)[i] for i in RNG.permutation(N)], operands(64)
    got = evaluate("mad.wide.s32", "wwd", 64, a, b, c)
    assert got == [(signed(x, 32) * signed(y, 32) + z) % 2**64 for x, y, z in zip(a, b, c, strict=True)]
    half, other = operands(16), [operands(16)[i] for i in RNG.permutation(N)]
    got = evaluate("mul.wide.u16", "hh", 32, half, other, out=32)
    assert got == [x * y for x, y in zip(half, other, strict=True)]
    got = evaluate("mad.hi.u32", "www", 32, a, b, a)
    assert got == [((x * y >> 32) + x) % 2**32 for x, y in zip(a, b, strict=True)]
    got = evaluate("sad.s32", "www", 32, a, b, a)
    assert got == [(abs(signed(x, 32) - signed(y, 32)) + x) % 2**32 for x, y in zip(a, b, strict=True)]


def test_saturated_sums() -> None:
    a, b = operands(32), [operands(32)[i] for i in RNG.permutation(N)]
    got = evaluate("add.sat.s32", "ww", 32, a, b)
    clamp = [max(-(2**31), min(2**31 - 1, signed(x, 32) + signed(y, 32))) for x, y in zip(a, b, strict=True)]
    assert got == [value % 2**32 for value in clamp]


def lop3(x: int, y: int, z: int, table: int) -> int:
    return sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1)) & 1) << i for i in range(32))


def field(x: int, start: int, length: int, width: int, is_signed: bool) -> int:
    """The ISA's pseudocode of bfe."""
    start, length = start & 255, length & 255
    if length == 0 or not is_signed:
        sign = 0
    else:
        sign = x >> min(start + length - 1, width - 1) & 1
    return sum((x >> (start + i) & 1 if i < length and start + i < width else sign) << i for i in range(width))


def insert(x: int, y: int, start: int, length: int, width: int) -> int:
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < width:
            y = y & ~(1 << (start + i)) | (x >> i & 1) << (start + i)
    return y


@pytest.mark.parametrize("width", [32, 64])
def test_bit_fields(width: int) -> None:
    a, b = operands(width), [operands(width)[i] for i in RNG.permutation(N)]
    starts, lengths = (RNG.integers(0, width + 6, N).tolist() for _ in range(2))
    kind = {32: "w", 64: "d"}[width]
    for sign in "us":
        got = evaluate(f"bfe.{sign}{width}", f"{kind}ww", width, a, starts, lengths)
        assert got == [field(x, s, n, width, sign == "s") for x, s, n in zip(a, starts, lengths, strict=True)]
    got = evaluate(f"bfi.b{width}", f"{kind}{kind}ww", width, a, b, starts, lengths)
    assert got == [insert(x, y, s, n, width) for x, y, s, n in zip(a, b, starts, lengths, strict=True)]


@pytest.mark.parametrize("width", [32, 64])
def test_bit_counts(width: int) -> None:
    a, kind = operands(width), {32: "w", 64: "d"}[width]
    assert evaluate(f"clz.b{width}", kind, 32, a) == [width - x.bit_length() for x in a]
    assert evaluate(f"popc.b{width}", kind, 32, a) == [x.bit_count() for x in a]
    assert evaluate(f"brev.b{width}", kind, width, a) == [int(f"{x:0{width}b}"[::-1], 2) for x in a]
    assert evaluate(f"bfind.u{width}", kind, 32, a) == [(x.bit_length() - 1) % 2**32 for x in a]
    lead = [~x & ((1 << width) - 1) if x >> (width - 1) else x for x in a]
    assert evaluate(f"bfind.s{width}", kind, 32, a) == [(x.bit_length() - 1) % 2**32 for x in lead]
    assert evaluate(f"not.b{width}", kind, width, a) == [x ^ ((1 << width) - 1) for x in a]
    assert evaluate(f"cnot.b{width}", kind, width, a) == [int(x == 0) for x in a]


def test_byte_permutation_funnel_shift_and_dot_product() -> None:
    a, b, c = operands(32), [operands(32)[i] for i in RNG.permutation(N)], [operands(32)[i] for i in RNG.permutation(N)]

    def permute(x: int, y: int, selector: int) -> int:
        pool, result = (x | y << 32).to_bytes(8, "little"), 0
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = pool[nibble & 7]
            result |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
        return result

    assert evaluate("prmt.b32", "www", 32, a, b, c) == [permute(x, y, z) for x, y, z in zip(a, b, c, strict=True)]
    got = evaluate("shf.l.wrap.b32", "www", 32, a, b, c)
    assert got == [((y << 32 | x) << (z & 31) >> 32) & 0xFFFFFFFF for x, y, z in zip(a, b, c, strict=True)]
    got = evaluate("shf.r.clamp.b32", "www", 32, a, b, c)
    assert got == [((y << 32 | x) >> min(z, 32)) & 0xFFFFFFFF for x, y, z in zip(a, b, c, strict=True)]

    def dot(x: int, y: int, z: int) -> int:
        return (z + sum(signed(x >> 8 * i, 8) * (y >> 8 * i & 255) for i in range(4))) % 2**32

    assert evaluate("dp4a.s32.u32", "www", 32, a, b, c) == [dot(x, y, z) for x, y, z in zip(a, b, c, strict=True)]


@pytest.mark.parametrize("table", [0x96, 0xCA, 0x01])
def test_any_function_of_three_bits(table: int) -> None:
    a, b, c = operands(32), [operands(32)[i] for i in RNG.permutation(N)], [operands(32)[i] for i in RNG.permutation(N)]
    ptx_opcode = "lop3.b32"
    got = evaluate_lop3(ptx_opcode, table, a, b, c)
    assert got == [lop3(x, y, z, table) for x, y, z in zip(a, b, c, strict=True)]


def evaluate_lop3(opcode: str, table: int, *columns: list[int]) -> list[int]:
    """``evaluate`` with an immediate after the registers, by an opcode in braces."""
    body = "{ .reg .b32 %keep; mov.b32 %keep, %c; " + f"{opcode} %r, %a, %b, %keep, {table}; }} mov.b32"
    # ``mov.b32 %r, %r`` ends the template's own instruction.
    return evaluate_body(body, *columns)


def evaluate_body(body: str, *columns: list[int]) -> list[int]:
    tensors = [torch.from_numpy(np.array([signed(v, 32) for v in column], np.int32)) for column in columns]
    result = torch.zeros(N, dtype=torch.int32)
    ptx = f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o, .param .u64 p0, .param .u64 p1, .param .u64 p2) {{
  .reg .b64 %at<4>; .reg .b64 %base<4>; .reg .b32 %t; .reg .b32 %r, %a, %b, %c;
  mov.u32 %t, %tid.x; mul.wide.u32 %at0, %t, 4;
  ld.param.u64 %base0, [p0]; add.u64 %at1, %at0, %base0; ld.global.b32 %a, [%at1];
  ld.param.u64 %base1, [p1]; add.u64 %at2, %at0, %base1; ld.global.b32 %b, [%at2];
  ld.param.u64 %base2, [p2]; add.u64 %at3, %at0, %base2; ld.global.b32 %c, [%at3];
  {body} %r, %r;
  ld.param.u64 %base3, [o]; add.u64 %at1, %at0, %base3; st.global.b32 [%at1], %r;
}}"""
    run_ptx(ptx, result, *tensors, block=N)
    return [value % 2**32 for value in result.tolist()]


def test_carry_chains_add_and_subtract_128_bits() -> None:
    a, b, c = operands(32), [operands(32)[i] for i in RNG.permutation(N)], [operands(32)[i] for i in RNG.permutation(N)]
    body = "{ .reg .b32 %x; add.cc.u32 %x, %a, %b; addc.cc.u32 %x, %b, %c; addc.u32 %r, %c, %a; } mov.b32"
    pairs = list(zip(a, b, c, strict=True))
    assert evaluate_body(body, a, b, c) == [
        ((x + (y << 32) + (z << 64)) + (y + (z << 32) + (x << 64)) >> 64) % 2**32 for x, y, z in pairs
    ]
    body = "{ .reg .b32 %x; sub.cc.u32 %x, %a, %b; subc.cc.u32 %x, %b, %c; subc.u32 %r, %c, %a; } mov.b32"
    assert evaluate_body(body, a, b, c) == [
        ((x + (y << 32) + (z << 64)) - (y + (z << 32) + (x << 64)) >> 64) % 2**32 for x, y, z in pairs
    ]
    body = "{ .reg .b32 %x; mad.lo.cc.u32 %x, %a, %b, %c; madc.hi.u32 %r, %a, %b, %c; } mov.b32"
    assert evaluate_body(body, a, b, c) == [((x * y + z + (z << 32)) >> 32) % 2**32 for x, y, z in pairs]


@pytest.mark.parametrize("opcode", ["add.s16x2", "add.u16x2", "min.s16x2", "max.u16x2"])
def test_packed_16_bit_integers(opcode: str) -> None:
    a, b = operands(32), [operands(32)[i] for i in RNG.permutation(N)]
    name, kind = opcode.split(".")

    def one(x: int, y: int) -> int:
        if kind[0] == "s":
            x, y = signed(x, 16), signed(y, 16)
        return {"add": x + y, "min": min(x, y), "max": max(x, y)}[name] & 0xFFFF

    want = [one(x & 0xFFFF, y & 0xFFFF) | one(x >> 16, y >> 16) << 16 for x, y in zip(a, b, strict=True)]
    assert evaluate(opcode, "ww", 32, a, b) == want


def test_24_bit_products_and_packing_conversions() -> None:
    a, b, c = operands(32), [operands(32)[i] for i in RNG.permutation(N)], [operands(32)[i] for i in RNG.permutation(N)]
    triples = list(zip(a, b, c, strict=True))
    assert evaluate("mul24.lo.u32", "ww", 32, a, b) == [(x % 2**24) * (y % 2**24) % 2**32 for x, y, _ in triples]
    want = [(signed(x, 24) * signed(y, 24) >> 16) % 2**32 for x, y, _ in triples]
    assert evaluate("mul24.hi.s32", "ww", 32, a, b) == want

    def clamp(value: int, low: int, high: int) -> int:
        return max(low, min(high, signed(value, 32)))

    got = evaluate("cvt.pack.sat.s16.s32", "ww", 32, a, b)
    assert got == [(clamp(x, -32768, 32767) % 2**16) << 16 | clamp(y, -32768, 32767) % 2**16 for x, y, _ in triples]
    got = evaluate("cvt.pack.sat.u8.s32.b32", "www", 32, a, b, c)
    assert got == [(z << 16 | clamp(x, 0, 255) << 8 | clamp(y, 0, 255)) % 2**32 for x, y, z in triples]


def test_lop3_tells_whether_a_bit_is_set() -> None:
    a, b = [0, 1, 2, 3] * (N // 4), [7 if i % 8 == 0 else 0 for i in range(N)]
    body = "{ .reg .pred p, q; setp.eq.u32 q, %b, 7; lop3.or.b32 %r|p, %a, %a, %a, 0x80, q;"
    body += "selp.u32 %r, 1, 0, p; } mov.b32"
    assert evaluate_body(body, a, b, a) == [int(x != 0 or y == 7) for x, y in zip(a, b, strict=True)]
