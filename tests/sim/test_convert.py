"""cvt against torch's casts, and against a search through the tables of all values of a format."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mkb_env.devices.simulator import convert
from mkb_env.devices.simulator.formats import decode

RNG = np.random.default_rng(20261201)
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DIRECTIONS = ("rn", "rna", "rz", "rm", "rp")


def torch_values(bits: np.ndarray, kind: str) -> np.ndarray:
    """float64 values of raw bits, by torch."""
    return torch.from_numpy(bits.copy()).view(TORCH[kind]).to(torch.float64).numpy()


def positive_values(kind: str) -> np.ndarray:
    """All finite values from +0 upwards; the index is the number's code, so its parity that of the last digit."""
    match kind:
        case "e2m1":
            return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        case "e3m2":
            return np.array(
                [m / 16 for m in range(4)] + [(4 + m) * 2.0 ** (e - 5) for e in range(1, 8) for m in range(4)]
            )
        case "e2m3":
            return np.array(
                [m / 8 for m in range(8)] + [(8 + m) * 2.0 ** (e - 4) for e in range(1, 4) for m in range(8)]
            )
        case "tf32":
            return (np.arange(0x7F800000 >> 13, dtype=np.uint32) << 13).view(np.float32).astype(np.float64)
        case "f16" | "bf16":
            every = torch_values(np.arange(1 << 15, dtype=np.uint16), kind)
        case _:
            every = torch_values(np.arange(1 << 7, dtype=np.uint8), kind)
    return every[np.isfinite(every)]


def search(x: np.ndarray, kind: str, rounding: str, finite: bool) -> np.ndarray:
    """Round by looking up the two neighbours of each value; ``finite`` saturates overflow."""
    table = positive_values(kind)
    beyond = table[-1] + (table[-1] - table[-2])  # the number after the largest, as if the exponent went on
    table = np.append(table, beyond)
    size, negative = np.abs(x), np.signbit(x)
    low = np.searchsorted(table, np.minimum(size, beyond), side="right") - 1
    high = np.minimum(low + (table[low] < size), len(table) - 1)
    below, above = size - table[low], table[high] - size
    up = {
        "rn": (above < below) | ((above == below) & (low % 2 == 1)),
        "rna": above <= below,
        "rz": np.zeros_like(negative),
        "rm": negative,
        "rp": ~negative,
    }[rounding]
    chosen = np.where(up, high, low)
    result = table[chosen]
    over = chosen == len(table) - 1
    # Directed away from the overflow side, a finite number too large gives the largest one, never infinity.
    stays = finite | (
        np.isfinite(x) & {"rn": False, "rna": False, "rz": True, "rm": ~negative, "rp": negative}[rounding]
    )
    result = np.where(over, np.where(stays, table[-2], np.inf), result)
    return np.where(negative, -result, result)


def samples(kind: str) -> np.ndarray:
    """float32 values over the whole range of a format: all bits, ties, near ties, the ends, zeros and infinities."""
    table = positive_values(kind)
    table = table if len(table) < 1 << 16 else RNG.choice(table, 20000)
    middle = (np.sort(table)[1:] + np.sort(table)[:-1]) / 2
    with np.errstate(over="ignore"):
        exact = np.concatenate([table, middle, table[-1:] * [1.01, 1.5, 2, 64], table[1:4] / 3]).astype(np.float32)
        near = np.concatenate(
            [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
        )
    wild = RNG.integers(0, 1 << 32, 20000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([near, wild, np.array([0, np.inf, 1e-45, 3.4e38], np.float32)])
    x = x[~np.isnan(x)]
    return np.concatenate([x, -x])


@pytest.mark.parametrize("kind", list(TORCH))
def test_decode_all_codes_as_torch(kind: str) -> None:
    container = np.uint8 if kind[0] == "e" else np.uint16
    bits = np.arange(np.iinfo(container).max + 1).astype(container)
    np.testing.assert_array_equal(decode(bits, kind), torch_values(bits, kind))
    wide = convert.cvt(bits, kind, "f32").view(np.float32)
    want = torch_values(bits, kind)
    np.testing.assert_array_equal(wide, want)
    np.testing.assert_array_equal(np.signbit(wide[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))
    back = convert.cvt(convert.cvt(bits, kind, "f32"), "f32", kind, "rn")
    keep = np.isfinite(want) | (np.isinf(want) & (kind != "e5m2"))  # e5m2 saturates
    np.testing.assert_array_equal(back[keep], bits[keep])


@pytest.mark.parametrize("kind", list(TORCH))
def test_round_to_nearest_as_torch(kind: str) -> None:
    x = samples(kind)
    limit = {"e4m3": 464.0, "e5m2": 61439.0}.get(kind, np.inf)  # past these PTX saturates, torch does not
    x = x[np.abs(x) <= limit]
    want = torch.from_numpy(x).to(TORCH[kind])
    want_bits = want.view(torch.uint8 if kind[0] == "e" else torch.uint16).numpy()
    np.testing.assert_array_equal(convert.cvt(x.view(np.uint32), "f32", kind, "rn"), want_bits)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
@pytest.mark.parametrize("rounding", DIRECTIONS)
def test_all_directions_by_search(kind: str, rounding: str) -> None:
    x = samples(kind)
    finite = kind in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
    got = decode(convert.cvt(x.view(np.uint32), "f32", kind, rounding), kind)
    want = search(x.astype(np.float64), kind, rounding, finite)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))
    saturated = decode(convert.cvt(x.view(np.uint32), "f32", kind, rounding, satfinite=True), kind)
    np.testing.assert_array_equal(saturated, search(x.astype(np.float64), kind, rounding, True))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_float64_rounds_once(kind: str) -> None:
    """A float64 just beside a tie, where rounding by way of float32 would land on the tie."""
    table = positive_values(kind)[1:2000]
    middle = (table[1:] + table[:-1]) / 2
    x = np.concatenate([np.nextafter(middle, np.inf), np.nextafter(middle, 0)])
    got = decode(convert.cvt(x.view(np.uint64), "f64", kind, "rn"), kind)
    np.testing.assert_array_equal(got, np.concatenate([table[1:], table[:-1]]))
    assert (np.float32(x).astype(np.float64) == np.concatenate([middle, middle])).any()


def test_named_shortcuts_agree_with_torch() -> None:
    x = samples("bf16")
    np.testing.assert_array_equal(convert.f32_to_bf16(x), torch.from_numpy(x).bfloat16().view(torch.uint16).numpy())
    np.testing.assert_array_equal(convert.f32_to_f16(x), torch.from_numpy(x).half().view(torch.uint16).numpy())
    bits = np.arange(1 << 16).astype(np.uint16)
    np.testing.assert_array_equal(convert.bf16_to_f32(bits), torch_values(bits, "bf16"))
    np.testing.assert_array_equal(convert.f16_to_f32(bits), torch_values(bits, "f16"))
    one_third = np.array([1 / 3, -1 / 3], np.float32)
    assert convert.f32_to_bf16(one_third, "rp").tolist() == [0x3EAB, 0xBEAA]
    assert convert.f32_to_f16(one_third, "rm").tolist() == [0x3555, 0xB556]


def test_nan_results() -> None:
    for bits in (0x7FC00000, 0xFF800001, 0x7F800001):
        nan = np.array([bits], np.uint32)
        want = {"bf16": 0x7FFF, "f16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F, "tf32": 0x7FFFFFFF, "f32": 0x7FFFFFFF}
        want |= {"e2m1": 0x7, "e3m2": 0x1F, "e2m3": 0x1F}
        for kind, code in want.items():
            rounding = None if kind == "f32" else "rn"
            assert convert.cvt(nan, "f32", kind, rounding).tolist() == [code], kind
            assert convert.cvt(nan, "f32", kind, rounding, relu=True).tolist() == [code], kind
        for kind in ("f16", "f32"):
            assert convert.cvt(nan, "f32", kind, rounding or "rn", sat=True).tolist() == [0]
    assert convert.cvt(np.array([0x7E01, 0xFE00], np.uint16), "f16", "f32").tolist() == [0x7FFFFFFF] * 2


def to_integer(x: float, rounding: str) -> int:
    exact = Fraction(x)
    match rounding:
        case "rzi":
            return math.trunc(exact)
        case "rmi":
            return math.floor(exact)
        case "rpi":
            return math.ceil(exact)
    return round(exact)


@pytest.mark.parametrize("src", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer_clamps(src: str, rounding: str) -> None:
    edges = [s * (2.0**p + d) for p in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, -0.5, 0, 0.5, 1) for s in (1, -1)]
    plain = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 3e38, -3e38, 1e-40, math.inf, -math.inf]
    x = np.array(edges + plain + list(RNG.normal(0, 300, 200)))
    with np.errstate(over="ignore"):
        bits = {
            "f16": lambda: x.astype(np.float16).view(np.uint16),
            "bf16": lambda: torch.from_numpy(x).bfloat16().view(torch.uint16).numpy(),
            "f32": lambda: x.astype(np.float32).view(np.uint32),
            "f64": lambda: x.view(np.uint64),
        }[src]()
    values = decode(bits, src)
    for dst, kind in convert.INTEGERS.items():
        info = np.iinfo(kind)
        got = convert.cvt(bits, src, dst, rounding).view(kind)
        for value, result in zip(values, got, strict=True):
            if math.isinf(value):
                want = info.max if value > 0 else info.min
            else:
                want = min(max(to_integer(float(value), rounding), info.min), info.max)
            assert int(result) == want, (src, dst, rounding, value)


def test_nan_to_integer() -> None:
    half, single, double = np.array([0x7E00], np.uint16), np.array([0x7FC00000], np.uint32), np.array([np.nan])
    for dst in convert.INTEGERS:
        width = int(dst[1:])
        assert convert.cvt(double.view(np.uint64), "f64", dst, "rzi").tolist() == [1 << (width - 1)]
        for bits, src in ((half, "f16"), (half | 0x1FF, "bf16"), (single, "f32")):
            assert convert.cvt(bits, src, dst, "rni").tolist() == [1 << 63 if width == 64 else 0]


def test_integer_to_integer() -> None:
    x = np.array([0, 1, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    for src in ("s32", "u32"):
        values = [int(v) for v in x.view(np.int32 if src == "s32" else np.uint32)]
        for dst, kind in convert.INTEGERS.items():
            width, info = int(dst[1:]), np.iinfo(kind)
            assert convert.cvt(x, src, dst).tolist() == [v % (1 << width) for v in values]
            clamped = [min(max(v, info.min), info.max) % (1 << width) for v in values]
            assert convert.cvt(x, src, dst, sat=True).tolist() == clamped


@pytest.mark.parametrize("src", ["s8", "u8", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("dst", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_integer_to_float(src: str, dst: str, rounding: str) -> None:
    kind = convert.INTEGERS[src]
    width, info = int(src[1:]), np.iinfo(kind)
    digits, top = {"f16": (11, 65504), "bf16": (8, None), "f32": (24, None), "f64": (53, None)}[dst]
    x = [0, 1, info.max, info.min, info.max - 1, info.max // 2 + 1]
    for shift in range(digits, width - 1):  # ties, and one beside them on either side
        x += [
            ((1 << digits) + odd << (shift - digits)) + (1 << (shift - digits) >> 1) + d
            for odd in (0, 1)
            for d in (-1, 0, 1)
        ]
    x += [int(v) for v in RNG.integers(info.min, info.max, 100, dtype=kind)]
    x = [v for v in x if info.min <= v <= info.max]
    bits = np.array(x, kind).view(f"u{width // 8}")
    for value, result in zip(x, decode(convert.cvt(bits, src, dst, rounding), dst), strict=True):
        assert float(result) == round_integer(value, digits, top, rounding), (value, rounding)


def round_integer(value: int, digits: int, top: int | None, rounding: str) -> float:
    size, negative = abs(value), value < 0
    drop = max(0, size.bit_length() - digits)
    low, rest, half = size >> drop, size & ((1 << drop) - 1), (1 << drop) >> 1
    away = {"rz": False, "rm": negative, "rp": not negative, "rn": rest > half or (rest == half and low % 2 == 1)}
    result = float((low + (rest > 0 and away[rounding])) << drop)
    if top is not None and result > top:
        result = math.inf if away[rounding] or rounding == "rn" else top
    return -result if negative else result


def test_flush_saturate_relu_and_integral_floats() -> None:
    x = np.array([1e-40, -1e-40, -0.0, 0.25, 1.5, -2.5, np.inf, -np.inf], np.float32)
    bits = x.view(np.uint32)
    flushed = convert.cvt(bits, "f32", "f32", ftz=True).view(np.float32)
    np.testing.assert_array_equal(flushed, np.where(np.abs(x) < 1e-38, 0, x))
    np.testing.assert_array_equal(np.signbit(flushed), np.signbit(x))
    tiny = np.array([1e-40, -1e-40]).view(np.uint64)
    assert convert.cvt(tiny, "f64", "f32", "rn", ftz=True).tolist() == [0, 0x80000000]
    assert convert.cvt(tiny, "f64", "f32", "rn").tolist() == [71362, 71362 | 0x80000000]
    assert convert.cvt(bits[:1], "f32", "s32", "rpi").tolist() == [1]
    assert convert.cvt(bits[:1], "f32", "s32", "rpi", ftz=True).tolist() == [0]
    assert convert.cvt(np.array([1, 0x8001], np.uint16), "bf16", "f32", ftz=True).tolist() == [0, 0x80000000]
    saturated = convert.cvt(bits, "f32", "f16", "rn", sat=True).view(np.float16)
    assert saturated.view(np.uint16).tolist() == [0, 0, 0, 0x3400, 0x3C00, 0, 0x3C00, 0]
    assert convert.cvt(bits, "f32", "bf16", "rn", relu=True).tolist() == [1, 0, 0, 0x3E80, 0x3FC0, 0, 0x7F80, 0]
    for rounding, want in (("rni", [0, 2, -2]), ("rzi", [0, 1, -2]), ("rmi", [0, 1, -3]), ("rpi", [1, 2, -2])):
        assert convert.cvt(bits[3:6], "f32", "f32", rounding).view(np.float32).tolist() == want


def test_packed_forms() -> None:
    a, b = (np.array([v], np.float32).view(np.uint32) for v in (1.0, -2.0))
    assert convert.pack2(a, b, "f32", "bf16").tolist() == [0x3F80C000]
    assert convert.pack2(a, b, "f32", "f16", "rz", relu=True).tolist() == [0x3C000000]
    for kind, code in (("e4m3", 0x38C0), ("e5m2", 0x3CC0), ("e2m3", 0x0830), ("e3m2", 0x0C30), ("e2m1", 0x2C)):
        packed = convert.pack2(a, b, "f32", kind)
        assert packed.tolist() == [code]
        assert packed.dtype == (np.uint8 if kind == "e2m1" else np.uint16)
        assert convert.cvt_packed(packed, kind, "f16").tolist() == [0x3C00C000]
        assert convert.cvt_packed(np.array([0x3C00C000], np.uint32), "f16", kind).tolist() == [code]
    high, low = convert.unpack2(np.array([0x12345678], np.uint32), "bf16")
    assert (high.tolist(), low.tolist()) == ([0x1234], [0x5678])


def test_ue8m0() -> None:
    x = np.array([1.0, 1.5, 2.0**-127, 2.0**-149, 3e38, 0.0, -4.0, np.inf, np.nan], np.float32).view(np.uint32)
    assert convert.cvt(x, "f32", "ue8m0", "rz").tolist() == [127, 127, 0, 0, 254, 0, 129, 254, 255]
    assert convert.cvt(x, "f32", "ue8m0", "rp").tolist() == [127, 128, 0, 0, 254, 0, 129, 254, 255]
    assert convert.cvt(np.array([0, 127, 254], np.uint8), "ue8m0", "bf16", "rn").tolist() == [0x0040, 0x3F80, 0x7F00]


@pytest.mark.parametrize(
    ("src", "dst", "rounding"),
    [
        ("f32", "bf16", None),
        ("f32", "s32", "rn"),
        ("s32", "f32", None),
        ("f32", "b32", "rn"),
        ("f32", "f16", "up"),
        ("x", "f32", None),
    ],
)
def test_refused(src: str, dst: str, rounding: str | None) -> None:
    with pytest.raises(ValueError, match=r"cvt|rounding|not a floating-point type"):
        convert.cvt(np.zeros(1, np.uint32), src, dst, rounding)


def test_no_packed_form() -> None:
    with pytest.raises(ValueError, match="no such packed type"):
        convert.pack2(np.zeros(1, np.uint32), np.zeros(1, np.uint32), "f32", "s8")
