"""PTX arithmetic against rational arithmetic, and approximate functions against mpmath."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from mkb_env.devices.simulator import numerics
from mkb_env.devices.simulator.convert import bf16_to_f32

RNG = np.random.default_rng(20261202)
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Format:
    name: str
    dtype: type[np.floating]
    digits: int
    min_exponent: int
    max_exponent: int

    @property
    def unsigned(self) -> str:
        return f"u{np.dtype(self.dtype).itemsize}"

    @property
    def options(self) -> dict[str, bool]:
        return {"bf16": True} if self.name == "bf16" else {}


F16 = Format("f16", np.float16, 11, -14, 15)
BF16 = Format("bf16", np.float32, 8, -126, 127)
F32 = Format("f32", np.float32, 24, -126, 127)
F64 = Format("f64", np.float64, 53, -1022, 1023)
FORMATS = pytest.mark.parametrize("fmt", [F16, BF16, F32, F64], ids=lambda f: f.name)
ROUNDINGS = pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])


def round_exact(exact: Fraction, fmt: Format, rounding: str, root: bool = False) -> float:
    """Round a non-zero rational (``root``: its square root) by integer arithmetic alone."""
    negative, size = exact < 0, abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    quantum = max(exponent // 2 if root else exponent, fmt.min_exponent) - (fmt.digits - 1)
    scaled = size / Fraction(4 if root else 2) ** quantum
    low = math.isqrt(math.floor(scaled)) if root else math.floor(scaled)
    inexact = scaled != (low * low if root else low)
    half = Fraction(2 * low + 1, 2)
    beside = scaled - (half * half if root else half)  # above or below the midpoint
    up = {
        "rn": beside > 0 or (beside == 0 and low % 2 == 1),
        "rz": False,
        "rm": inexact and negative,
        "rp": inexact and not negative,
    }[rounding]
    value = (low + up) * Fraction(2) ** quantum
    if value >= Fraction(2) ** (fmt.max_exponent + 1):
        largest = (2 - Fraction(2) ** (1 - fmt.digits)) * Fraction(2) ** fmt.max_exponent
        to_infinity = rounding == "rn" or rounding == ("rm" if negative else "rp")
        result = INF if to_infinity else float(largest)
    else:
        result = float(value)
    return -result if negative else result


def random_values(fmt: Format, count: int) -> np.ndarray:
    """Half near one, half over all finite bit patterns."""
    bits = 16 if fmt in (F16, BF16) else np.dtype(fmt.dtype).itemsize * 8
    wild = RNG.integers(0, 1 << bits, 2 * count, dtype=f"u{bits // 8}")
    wild = bf16_to_f32(wild) if fmt is BF16 else wild.view(fmt.dtype)
    wild = wild[np.isfinite(wild)][: count // 2]
    near = rounded_to(fmt, RNG.normal(0, 2, count - len(wild)))
    return RNG.permutation(np.concatenate([wild, near]))


def rounded_to(fmt: Format, x: np.ndarray) -> np.ndarray:
    """Values of the format near ``x``."""
    if fmt is BF16:
        return bf16_to_f32((x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    return x.astype(fmt.dtype)


def adversarial(fmt: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products that lie midway between two numbers, with a third operand that only just breaks or keeps the tie; sums
    that cancel; results at the ends of the range.
    """
    p = fmt.digits
    smallest = 2.0 ** (fmt.min_exponent - p + 1)
    rows: list[tuple[float, float, float]] = []
    for odd in (1, 3, 2 ** (p - 1) - 1, 2 ** (p - 2) + 1):
        a = (2 ** (p - 1) + odd) * 2.0 ** (1 - p)
        for b in (1.5, 1.25, 1 + 2.0 ** (1 - p), 3.0):
            for c in (0.0, smallest, -smallest, 2.0 ** -(p + 1), -(2.0**-p), 2.0 ** (p + 1), -(2.0**p)):
                rows += [(a, b, c), (-a, b, c)]
    ulp = 2.0 ** (1 - p)
    for a, b in ((1 + ulp, ulp / 2), (1 - ulp / 2, ulp / 2), (ulp / 2, 1.0), (ulp / 4, 1 + ulp), (smallest, 0.5)):
        for c in (1.0, 1 + ulp, 1 - ulp / 2, -1.0, 2 - ulp, smallest, 0.0):
            rows += [(a, b, c), (-a, b, c)]
    top = (2 - ulp) * 2.0**fmt.max_exponent
    for a, b, c in (
        (top, 1.0, top * ulp / 2),
        (top, 2.0, -top),
        (top, 1 + ulp, 0.0),
        (top, top, -top),
        (top, 1.0, smallest),
    ):
        rows += [(a, b, c), (-a, b, -c)]
    tiny = 2.0**fmt.min_exponent
    for a, b, c in (
        (tiny, 1 - ulp / 2, 0.0),
        (tiny, 0.5, smallest),
        (tiny, ulp / 2, tiny),
        (tiny, ulp, -smallest),
        (tiny, tiny, tiny),
    ):
        rows += [(a, b, c), (a, b, -c), (a, -b, c)]
    for a, b, c in (
        (0.0, 1.0, 0.0),
        (-0.0, 1.0, 0.0),
        (-0.0, 1.0, -0.0),
        (0.0, -1.0, -0.0),
        (3.0, 2.0, -6.0),
        (-3.0, 2.0, 6.0),
    ):
        rows.append((a, b, c))
    # Subnormal sums that lie 2**(-2 * p + 2) half units beside a midpoint.
    exponent = fmt.min_exponent - p
    a, b = (1 + ulp) * 2.0 ** (exponent // 2), (1 - ulp) * 2.0 ** (exponent - exponent // 2)
    for k in (1, 2, 2 ** (p - 2), 2 ** (p - 2) + 1):
        rows += [(a, b, k * smallest), (-a, b, k * smallest), (a, b, -k * smallest)]
    with np.errstate(all="ignore"):
        columns = [rounded_to(fmt, np.array(column)) for column in zip(*rows, strict=True)]
    keep = np.isfinite(columns[0]) & np.isfinite(columns[1]) & np.isfinite(columns[2])
    return columns[0][keep], columns[1][keep], columns[2][keep]


def triples(fmt: Format, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, b, c = (random_values(fmt, count) for _ in range(3))
    with np.errstate(all="ignore"):
        # A third of the sums cancel to a few digits: c is close to -a * b.
        close = rounded_to(fmt, -(a.astype(np.float64) * b))
        c = np.where((np.arange(count) % 3 == 0) & np.isfinite(close), close, c).astype(fmt.dtype)
    return tuple(np.concatenate(pair) for pair in zip((a, b, c), adversarial(fmt), strict=True))  # type: ignore[return-value]


def check(fmt: Format, got: np.ndarray, want: list[float], *operands: np.ndarray) -> None:
    assert got.dtype == fmt.dtype
    expected = np.array(want, np.float64).astype(fmt.dtype)
    wrong = np.flatnonzero(got.view(fmt.unsigned) != expected.view(fmt.unsigned))
    shown = [(*(float(o[i]).hex() for o in operands), float(got[i]).hex(), float(expected[i]).hex()) for i in wrong[:5]]
    assert not len(wrong), f"{len(wrong)} of {len(got)} lanes differ, operands, got, want: {shown}"


def zero(p: float, q: float, rounding: str) -> float:
    """The sign rule of IEEE 754 for an exact zero sum."""
    if math.copysign(1, p) == math.copysign(1, q):
        return p * 0.0
    return -0.0 if rounding == "rm" else 0.0


@FORMATS
@ROUNDINGS
def test_fma(fmt: Format, rounding: str) -> None:
    a, b, c = triples(fmt, 1500)
    want = []
    for x, y, z in zip(a.astype(float), b.astype(float), c.astype(float), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        sign = math.copysign(0.0, x) if math.copysign(1, y) > 0 else -math.copysign(0.0, x)
        want.append(round_exact(exact, fmt, rounding) if exact else zero(sign, z, rounding))
    check(fmt, numerics.fma(a, b, c, rounding, **fmt.options), want, a, b, c)


@FORMATS
@ROUNDINGS
def test_add_sub_mul(fmt: Format, rounding: str) -> None:
    a, b, c = triples(fmt, 600)
    a, b = np.concatenate([a, a]), np.concatenate([b, c])
    sums, differences, products = [], [], []
    for x, y in zip(a.astype(float), b.astype(float), strict=True):
        p, q = Fraction(x), Fraction(y)
        sums.append(round_exact(p + q, fmt, rounding) if p + q else zero(x, y, rounding))
        differences.append(round_exact(p - q, fmt, rounding) if p != q else zero(x, -y, rounding))
        products.append(round_exact(p * q, fmt, rounding) if p * q else math.copysign(1, x) * math.copysign(0.0, y))
    check(fmt, numerics.add(a, b, rounding, **fmt.options), sums, a, b)
    check(fmt, numerics.sub(a, b, rounding, **fmt.options), differences, a, b)
    check(fmt, numerics.mul(a, b, rounding, **fmt.options), products, a, b)


@pytest.mark.parametrize("fmt", [F32, F64], ids=lambda f: f.name)
@ROUNDINGS
def test_div_rcp_sqrt(fmt: Format, rounding: str) -> None:
    a, b, _ = triples(fmt, 800)
    a, b = a[b != 0], b[b != 0]
    quotients, reciprocals, roots = [], [], []
    for x, y in zip(a.astype(float), b.astype(float), strict=True):
        quotient = Fraction(x) / Fraction(y)
        quotients.append(
            round_exact(quotient, fmt, rounding) if quotient else math.copysign(1, x) * math.copysign(0.0, y)
        )
        reciprocals.append(round_exact(1 / Fraction(y), fmt, rounding))
        roots.append(round_exact(abs(Fraction(y)), fmt, rounding, root=True))
    check(fmt, numerics.div(a, b, rounding), quotients, a, b)
    check(fmt, numerics.rcp(b, rounding), reciprocals, b)
    check(fmt, numerics.sqrt(np.abs(b), rounding), roots, b)


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_infinities_and_nan(dtype: type[np.floating], rounding: str) -> None:
    top = float(np.finfo(dtype).max)
    cases = [
        (INF, 0.0, 1.0, NAN),
        (INF, 1.0, -INF, NAN),
        (INF, -1.0, -INF, -INF),
        (top, top, -INF, -INF),
        (-top, top, INF, INF),
        (1.0, NAN, 1.0, NAN),
        (1.0, 1.0, NAN, NAN),
        (INF, 2.0, 1.0, INF),
        (2.0, 3.0, INF, INF),
    ]
    a, b, c, want = (np.array(column, dtype) for column in zip(*cases, strict=True))
    np.testing.assert_array_equal(numerics.fma(a, b, c, rounding), want)
    one, zero_, inf, nan = (np.array([v], dtype) for v in (1, 0, INF, NAN))
    assert np.isnan(numerics.add(inf, -inf, rounding)).all()
    assert numerics.add(inf, one, rounding).tolist() == [INF]
    assert np.isnan(numerics.mul(inf, zero_, rounding)).all()
    if dtype != np.float16:
        assert numerics.div(one, zero_, rounding).tolist() == [INF]
        assert numerics.div(-one, zero_, rounding).tolist() == [-INF]
        assert numerics.div(one, inf, rounding).tolist() == [0.0]
        assert np.isnan(numerics.div(zero_, zero_, rounding)).all()
        assert np.isnan(numerics.sqrt(-one, rounding)).all()
        assert numerics.sqrt(inf, rounding).tolist() == [INF]
        assert np.signbit(numerics.sqrt(-zero_, rounding)).all()
    assert np.isnan(numerics.add(nan, one, rounding)).all()


def test_nan_is_canonical() -> None:
    payload = np.array([0xFFC12345], np.uint32).view(np.float32)
    one, inf = np.ones(1, np.float32), np.array([INF], np.float32)
    results = {
        "add": numerics.add(payload, one),
        "fma": numerics.fma(one, one, payload),
        "mul": numerics.mul(inf, 0 * one),
        "rz": numerics.mul(payload, one, "rz"),
        "div": numerics.div(payload, one, full=True),
        "sqrt": numerics.sqrt(-one),
        "min": numerics.minimum(payload, payload),
        "max.NaN": numerics.maximum(payload, one, nan=True),
        "lg2": numerics.lg2(-one, ftz=True),
        "sin": numerics.sin(inf),
        "ex2": numerics.ex2(payload),
        "bf16": numerics.fma(payload, one, one, bf16=True),
    }
    assert {k: v.view(np.uint32).tolist() for k, v in results.items()} == {k: [0x7FFFFFFF] for k in results}
    half = np.array([0xFE01], np.uint16).view(np.float16)
    assert numerics.add(half, half).view(np.uint16).tolist() == [0x7FFF]


def test_modifiers() -> None:
    x = np.array([1e-40, -1e-40, 1.0, -1.0, 2.0, -0.0, NAN], np.float32)
    zero_ = np.zeros(7, np.float32)
    flushed = numerics.mul(x, np.ones(7, np.float32), ftz=True)
    assert flushed.view(np.uint32)[:2].tolist() == [0, 0x80000000]
    # The exact sum is normal, but ftz reads its operands as zero.
    half = np.full(1, 2.0**-127, np.float32)
    assert numerics.add(half, half).tolist() == [2.0**-126]
    assert numerics.add(half, half, ftz=True).tolist() == [0.0]
    assert numerics.fma(half, 2 / np.ones(1, np.float32), half, ftz=True).tolist() == [0.0]
    saturated = numerics.add(x, zero_, sat=True)
    assert (
        saturated.view(np.uint32).tolist() == np.array([1e-40, 0, 1, 0, 1, 0, 0], np.float32).view(np.uint32).tolist()
    )
    relu = numerics.fma(x, np.ones(7, np.float32), -zero_, relu=True)
    assert relu.view(np.uint32).tolist() == [71362, 0, 0x3F800000, 0, 0x40000000, 0, 0x7FFFFFFF]
    small = np.array([2.0**-20], np.float16)
    assert numerics.add(small, small).tolist() == [2.0**-19]
    assert numerics.add(small, small, ftz=True).tolist() == [0.0]


def test_operands_of_one_lane_are_spread() -> None:
    x = np.array([1.5, 2.5, -3.0], np.float32)
    one = np.array([2.0], np.float32)
    assert numerics.fma(x, one, one).tolist() == [5.0, 7.0, -4.0]
    assert numerics.fma(one.astype(float), one.astype(float), x.astype(float)).tolist() == [5.5, 6.5, 1.0]


def relative(got: np.ndarray, f: Callable[[mpmath.mpf], mpmath.mpf], x: np.ndarray) -> float:
    mpmath.mp.prec = 120
    return max(
        abs(float((mpmath.mpf(float(g)) - f(v)) / f(v))) for g, v in zip(got, map(mpmath.mpf, x.tolist()), strict=True)
    )


def test_approximations_are_within_half_an_ulp() -> None:
    """Every bound of the PTX ISA is larger than the 2**-24 of a correct rounding."""
    x = np.concatenate([RNG.uniform(-126, 127, 300), RNG.normal(0, 1, 300)]).astype(np.float32)
    y = np.exp2(RNG.uniform(-125, 126, 500)).astype(np.float32)
    angle = RNG.uniform(-math.pi, math.pi, 500).astype(np.float32)
    bound = 2.0**-24 * 1.001
    assert relative(numerics.ex2(x, ftz=True), lambda v: mpmath.power(2, v), x) < bound
    assert relative(numerics.lg2(y), lambda v: mpmath.log(v, 2), y) < bound
    assert relative(numerics.rsqrt(y, ftz=True), lambda v: 1 / mpmath.sqrt(v), y) < bound
    assert relative(numerics.rcp(y, approx=True), lambda v: 1 / v, y) < bound
    assert relative(numerics.sqrt(y, approx=True), mpmath.sqrt, y) < bound
    assert relative(numerics.sin(angle), mpmath.sin, angle) < bound
    assert relative(numerics.cos(angle), mpmath.cos, angle) < bound
    assert relative(numerics.tanh(x), mpmath.tanh, x) < bound
    h = RNG.normal(0, 2, 200).astype(np.float16)
    assert relative(numerics.tanh(h), mpmath.tanh, h) < 2.0**-11 * 1.001
    b = rounded_to(BF16, RNG.normal(0, 2, 200))
    got = numerics.ex2(b, ftz=True, bf16=True)
    assert relative(got, lambda v: mpmath.power(2, v), b) < 2.0**-8 * 1.001
    np.testing.assert_array_equal(got, rounded_to(BF16, got))


def test_special_values_of_the_approximations() -> None:
    x = np.array([-INF, -1.0, -1e-40, -0.0, 0.0, 1e-40, INF, NAN], np.float32)

    def bits(*values: float) -> list[int]:
        wanted = np.array(values, np.float32)
        return np.where(np.isnan(wanted), 0x7FFFFFFF, wanted.view(np.uint32)).tolist()

    table = {
        numerics.ex2: bits(0, 0.5, 1, 1, 1, 1, INF, NAN),
        numerics.lg2: bits(NAN, NAN, -INF, -INF, -INF, -INF, INF, NAN),
        numerics.rsqrt: bits(NAN, NAN, -INF, -INF, INF, INF, 0, NAN),
        lambda v, ftz: numerics.rcp(v, ftz=ftz, approx=True): bits(-0.0, -1, -INF, -INF, INF, INF, 0, NAN),
        lambda v, ftz: numerics.sqrt(v, ftz=ftz, approx=True): bits(NAN, NAN, -0.0, -0.0, 0, 0, INF, NAN),
    }
    for function, want in table.items():
        assert function(x, ftz=True).view(np.uint32).tolist() == want
    assert numerics.sin(x, ftz=True).view(np.uint32)[[0, 2, 3, 4, 5, 6]].tolist() == bits(NAN, -0.0, -0.0, 0, 0, NAN)
    assert numerics.cos(x, ftz=True).view(np.uint32)[[0, 2, 3, 4, 5, 6]].tolist() == bits(NAN, 1, 1, 1, 1, NAN)
    assert numerics.tanh(x).view(np.uint32)[[0, 3, 4, 6, 7]].tolist() == bits(-1, -0.0, 0, 1, NAN)
    assert numerics.lg2(np.array([2.0**-140], np.float32)).tolist() == [-140.0]


def test_approximate_division_by_huge_numbers() -> None:
    a = np.array([1.0, -1.0, INF, 3e38, NAN], np.float32)
    huge = np.full(5, 2.0**127, np.float32)
    assert numerics.div(a, huge, approx=True).view(np.uint32).tolist() == [0, 0x80000000, 0x7FFFFFFF, 0, 0x7FFFFFFF]
    assert numerics.div(a, huge, full=True)[:2].tolist() == [2.0**-127, -(2.0**-127)]
    assert numerics.div(a[:2], huge[:2] / 2, approx=True).tolist() == [2.0**-126, -(2.0**-126)]


def test_double_precision_approximations_use_the_upper_half() -> None:
    x = np.array([3.0, 1e-310, -INF, 1.1])
    got = numerics.rcp(x, approx=True, ftz=True)
    assert (got.view(np.uint64) & 0xFFFFFFFF).tolist() == [0] * 4
    assert got[1:3].tolist() == [INF, -0.0]
    assert numerics.rsqrt(-x[:1], ftz=True).view(np.uint64).tolist() == [0x7FFFFFFF00000000]
    assert abs(got[0] * 3 - 1) < 2.0**-19
    assert abs(numerics.rsqrt(x[3:], ftz=True)[0] ** 2 * 1.1 - 1) < 2.0**-18


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_minimum_maximum(dtype: type[np.floating]) -> None:
    values = [-INF, -1.0, -0.0, 0.0, 2.0, INF, NAN]
    pairs = [(p, q) for p in values for q in values]
    a, b = (np.array(column, dtype) for column in zip(*pairs, strict=True))

    def expected(p: float, q: float, largest: bool, nan: bool) -> float:
        if math.isnan(p) or math.isnan(q):
            return NAN if nan or (math.isnan(p) and math.isnan(q)) else (q if math.isnan(p) else p)
        ordered = sorted((p, q), key=lambda v: (v, math.copysign(1, v)))
        return ordered[largest]

    for largest, function in ((False, numerics.minimum), (True, numerics.maximum)):
        for nan in (False, True):
            want = np.array([expected(p, q, largest, nan) for p, q in pairs], dtype)
            got = function(a, b, nan=nan)
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


def test_minimum_maximum_forms() -> None:
    a, b, c = (
        np.array(v, np.float32) for v in ([-3.0, NAN, -1e-40, -2.0], [2.0, -1.0, 0.0, -5.0], [1.0, 4.0, 1.0, NAN])
    )
    assert numerics.minimum(a, b, xorsign_abs=True).tolist() == [-2.0, -1.0, 0.0, 2.0]
    assert np.signbit(numerics.minimum(a, b, xorsign_abs=True)).tolist() == [True, True, True, False]
    assert numerics.maximum(a, b, xorsign_abs=True)[[0, 3]].tolist() == [-3.0, 5.0]
    assert numerics.maximum(a, b, c).tolist() == [2.0, 4.0, 1.0, -2.0]
    assert numerics.minimum(a, b, c, magnitude=True).tolist() == [1.0, 1.0, 0.0, 2.0]
    assert np.isnan(numerics.minimum(a, b, c, nan=True)).tolist() == [False, True, False, True]
    assert np.signbit(numerics.minimum(a, b, ftz=True))[2]
    assert numerics.minimum(a, b, ftz=True)[2] == 0
