"""PTX floating-point arithmetic, elementwise on NumPy arrays of float16, float32 or float64.

Sources: PTX ISA, sections "Floating Point Instructions" and "Half Precision Floating Point Instructions". Every
result of add, sub, mul, fma, div, rcp and sqrt with a rounding modifier is the correctly rounded one. Results that are
NaN have the bits 0x7fffffff in float32 (the ISA leaves them open, except for min and max, and NVIDIA's GPUs give these)
and 0x7fff in float16; float64 keeps payloads as the host does, which the ISA asks for.

bf16 values travel as float32 arrays: pass ``bf16=True`` and the result is rounded once to bf16 (still float32).
Modifiers: ``ftz`` turns subnormal inputs and results into zeros of the same sign; ``sat`` limits the result to
[+0, 1], NaN to +0; ``relu`` turns negative results and -0 into +0 and keeps NaN. Nothing here warns.

The approximate functions (``.approx``, ``.full``) are computed in float64 and rounded to nearest once. The hardware's
results differ from these within the error bounds of the PTX ISA: 1 to 2 ulp for rcp, sqrt, rsqrt, ex2 and div; 2**-22
for lg2, absolute within (0.5, 2) and relative elsewhere; 2**-20.5 absolute for sin and cos within [-pi, pi]; 2**-11
relative for tanh in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from mkb_env.devices.simulator.exact import direct, rounded, to_odd, two_product, two_sum
from mkb_env.devices.simulator.formats import FORMATS, Array, canonical, flush, quiet, round_to_format

_BF16 = FORMATS["bf16"]
_FORMAT_OF = {np.dtype(np.float16): FORMATS["f16"], np.dtype(np.float32): FORMATS["f32"]}


def _modify(r: Array, ftz: bool, sat: bool, relu: bool) -> Array:
    """Apply the modifiers to a fresh result."""
    if ftz:
        r = flush(r)
    if sat:
        r = np.fmin(np.fmax(r, r.dtype.type(0)), r.dtype.type(1))
        r += r.dtype.type(0)  # -0 + 0 is +0
    if relu:
        r = np.where(r <= 0, r.dtype.type(0), r)
    return canonical(r)


def _narrow(s: Array, dtype: Any, rounding: str, bf16: bool) -> Array:
    """Round float64 values, exact or rounded to odd, to ``dtype`` (or to bf16 held in float32)."""
    if rounding == "rn" and not bf16:
        return s.astype(dtype)
    return round_to_format(s, _BF16 if bf16 else _FORMAT_OF[np.dtype(dtype)], rounding).astype(dtype)


def _zero_sum(s: Array, p: Array, q: Array, rounding: str) -> Array:
    """Sign of an exact zero sum ``p + q`` of terms with unlike signs: -0 when rounding down, else +0."""
    if rounding == "rm":
        s = np.where((s == 0) & (np.signbit(p) != np.signbit(q)), -0.0, s)
    return s


# add, sub, mul, fma --------------------------------------------------------------------------------------------------


@quiet
def add(
    a: Array,
    b: Array,
    rounding: str = "rn",
    ftz: bool = False,
    sat: bool = False,
    bf16: bool = False,
    relu: bool = False,
) -> Array:
    """``a + b``."""
    if ftz:
        a, b = flush(a), flush(b)
    if rounding == "rn" and not bf16:
        return _modify(a + b, ftz, sat, relu)
    if a.dtype == np.float64:
        plain = _zero_sum(a + b, a, b, rounding)
        return _modify(rounded(lambda x, y: x + y, plain, rounding, a, b), ftz, sat, relu)
    p, q = a.astype(np.float64), b.astype(np.float64)
    s = _zero_sum(to_odd(*two_sum(p, q)), p, q, rounding)
    return _modify(_narrow(s, a.dtype, rounding, bf16), ftz, sat, relu)


def sub(
    a: Array,
    b: Array,
    rounding: str = "rn",
    ftz: bool = False,
    sat: bool = False,
    bf16: bool = False,
    relu: bool = False,
) -> Array:
    """``a - b``."""
    return add(a, -b, rounding, ftz, sat, bf16, relu)


@quiet
def mul(
    a: Array,
    b: Array,
    rounding: str = "rn",
    ftz: bool = False,
    sat: bool = False,
    bf16: bool = False,
    relu: bool = False,
) -> Array:
    """``a * b``."""
    if ftz:
        a, b = flush(a), flush(b)
    if rounding == "rn" and not bf16:
        return _modify(a * b, ftz, sat, relu)
    if a.dtype == np.float64:
        return _modify(rounded(lambda x, y: x * y, a * b, rounding, a, b), ftz, sat, relu)
    s = a.astype(np.float64) * b  # exact: at most 48 digits, exponents within those of float64
    return _modify(_narrow(s, a.dtype, rounding, bf16), ftz, sat, relu)


@quiet
def fma(
    a: Array,
    b: Array,
    c: Array,
    rounding: str = "rn",
    ftz: bool = False,
    sat: bool = False,
    bf16: bool = False,
    relu: bool = False,
) -> Array:
    """``a * b + c`` with one rounding."""
    if ftz:
        a, b, c = flush(a), flush(b), flush(c)
    if a.dtype == np.float64:
        return _modify(_fma_f64(a, b, c, rounding), ftz, sat, relu)
    if a.dtype == np.float32 and rounding == "rn" and not bf16:
        return _modify(_fma_f32(a, b, c), ftz, sat, relu)
    p, q = a.astype(np.float64) * b, c.astype(np.float64)
    s = _zero_sum(to_odd(*two_sum(p, q)), p, q, rounding)
    return _modify(_narrow(s, a.dtype, rounding, bf16), ftz, sat, relu)


def _fma_f32(a: Array, b: Array, c: Array) -> Array:
    """The product is exact in float64; rounding the float64 sum again to float32 errs only where the sum was inexact
    and lies midway between two float32 numbers. Only those lanes (and results that are subnormal in float32, where
    "midway" has other bits) need the sum rounded to odd.
    """
    p = a.astype(np.float64) * b.astype(np.float64)
    s = p + c.astype(np.float64)
    risky = (s.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    tiny = np.abs(s) < 2.0**-126
    if np.count_nonzero(tiny):
        risky |= tiny & (s != 0)  # a sum is zero only where it is exact
    if np.count_nonzero(risky):
        p, c = np.broadcast_to(p, s.shape), np.broadcast_to(c, s.shape)
        s[risky] = to_odd(*two_sum(p[risky], c[risky].astype(np.float64)))
    return s.astype(np.float32)


def _fma_f64(a: Array, b: Array, c: Array, rounding: str) -> Array:
    """Boldo and Melquiond's emulation for operands of moderate size, rational arithmetic for all others."""
    a, b, c = np.broadcast_arrays(a, b, c)
    finite = np.isfinite(a) & np.isfinite(b)
    plain = np.where(finite & ~np.isfinite(c), c, a * b + c)
    if rounding != "rn":
        plain = _zero_sum(plain, a * b, c, rounding)
        return rounded(lambda x, y, z: x * y + z, plain, rounding, a, b, c)
    p, p_error = two_product(a, b)
    t, t_error = two_sum(c, p_error)
    v, v_error = two_sum(p, t)
    r = v + to_odd(*two_sum(t_error, v_error))
    # A zero sum has no error to add, and its sign is that of the plain operation.
    r = np.where(r == 0, plain, r)
    x, y = np.abs(a), np.abs(b)
    small, large = 2.0**-480, 2.0**480
    safe = ((x > small) & (y > small) | (a == 0) | (b == 0)) & (x < large) & (y < large) & (np.abs(c) < 2.0**1000)
    if not safe.all():
        exact = ~safe & finite & np.isfinite(c)
        r = np.where(safe, r, plain)
        r[exact] = rounded(lambda x, y, z: x * y + z, plain[exact], "rn", a[exact], b[exact], c[exact])
    return r


# div, rcp, sqrt ------------------------------------------------------------------------------------------------------


@quiet
def div(a: Array, b: Array, rounding: str = "rn", ftz: bool = False, approx: bool = False, full: bool = False) -> Array:
    """``a / b`` by ``rounding``, or ``.approx`` or ``.full`` (here the quotient rounded to nearest).

    ``.approx`` keeps the ISA's rule for divisors of magnitude above 2**126: a zero of the quotient's sign, or NaN where
    ``a`` is infinite.
    """
    if ftz:
        a, b = flush(a), flush(b)
    r = a / b
    if approx:
        huge = (np.abs(b) > 2.0**126) & np.isfinite(b)
        if np.count_nonzero(huge):
            beyond = np.where(np.isfinite(a), np.copysign(a.dtype.type(0), r), a.dtype.type(np.nan))
            r = np.where(huge, beyond, r)
    elif not full and rounding != "rn":
        r = _directed_quotient(a, b, r, rounding)
    return _modify(r, ftz, False, False)


def _directed_quotient(a: Array, b: Array, r: Array, rounding: str) -> Array:
    if a.dtype == np.float64:
        nonzero = np.where(b == 0, np.nan, b)  # x/0 stays as the host has it
        return rounded(lambda x, y: x / y, r, rounding, a, nonzero)
    # r * b is exact in float64, so that its comparison with a tells on which side of r the quotient lies.
    sides = np.sign(a.astype(np.float64) - r.astype(np.float64) * b) * np.sign(b)
    overflow = np.isinf(r) & np.isfinite(a) & (b != 0)
    return direct(r, np.where(overflow, -np.sign(r), sides), rounding)


def rcp(a: Array, rounding: str = "rn", ftz: bool = False, approx: bool = False) -> Array:
    """``1 / a`` by ``rounding``, or ``.approx`` (``rcp.approx.ftz.f64`` uses only the upper 32 bits of a float64)."""
    if approx and a.dtype == np.float64:
        return _upper_half(np.reciprocal, a)
    return div(np.ones_like(a), a, rounding, ftz, full=approx)


@quiet
def sqrt(a: Array, rounding: str = "rn", ftz: bool = False, approx: bool = False) -> Array:
    """Square root by ``rounding``, or ``.approx``; NaN for negative numbers, -0 for -0."""
    if ftz:
        a = flush(a)
    r = np.sqrt(a)
    if not approx and rounding != "rn":
        r = _directed_root(a, r, rounding)
    return _modify(r, ftz, False, False)


def _directed_root(a: Array, r: Array, rounding: str) -> Array:
    if a.dtype != np.float64:
        wide = r.astype(np.float64)
        return direct(r, np.sign(a - wide * wide), rounding)
    flat, roots = a.reshape(-1), r.reshape(-1)
    sides = np.zeros(flat.shape)
    for i in np.flatnonzero(np.isfinite(flat) & (flat > 0)):
        square = Fraction(float(roots[i])) ** 2
        sides[i] = (Fraction(float(flat[i])) > square) - (Fraction(float(flat[i])) < square)
    return direct(r, sides.reshape(a.shape), rounding)


# Approximate functions -----------------------------------------------------------------------------------------------


@quiet
def _approximate(f: Callable[[Array], Array], a: Array, ftz: bool, bf16: bool = False) -> Array:
    if ftz:
        a = flush(a)
    r = _narrow(f(a.astype(np.float64)), a.dtype, "rn", bf16)
    return _modify(r, ftz, False, False)


_UPPER_NAN = np.uint64(0x7FFFFFFF00000000).view(np.float64)


@quiet
def _upper_half(f: Callable[[Array], Array], a: Array) -> Array:
    """``.approx.ftz.f64``: low 32 bits of input and result are zero, NaN has one encoding, subnormals are flushed."""
    mask = np.uint64(0xFFFFFFFF00000000)
    r = flush(f(flush((a.view(np.uint64) & mask).view(np.float64))))
    nan = np.isnan(r)
    upper: Array = (r.view(np.uint64) & mask).view(np.float64)
    return np.where(nan, _UPPER_NAN, upper)


def rsqrt(a: Array, ftz: bool = False) -> Array:
    """``1 / sqrt(a)``: infinity of the same sign for zeros, NaN below zero."""
    if a.dtype == np.float64 and ftz:
        return _upper_half(lambda x: 1.0 / np.sqrt(x), a)
    return _approximate(lambda x: 1.0 / np.sqrt(x), a, ftz)


def ex2(a: Array, ftz: bool = False, bf16: bool = False) -> Array:
    """``2 ** a``."""
    return _approximate(np.exp2, a, ftz, bf16)


def lg2(a: Array, ftz: bool = False) -> Array:
    """Base-2 logarithm: -infinity for zeros, NaN below zero."""
    return _approximate(np.log2, a, ftz)


def sin(a: Array, ftz: bool = False) -> Array:
    """Sine of radians; NaN for infinities. The hardware loses accuracy outside [-pi, pi], this does not."""
    return _approximate(np.sin, a, ftz)


def cos(a: Array, ftz: bool = False) -> Array:
    """Cosine of radians; NaN for infinities. The hardware loses accuracy outside [-pi, pi], this does not."""
    return _approximate(np.cos, a, ftz)


def tanh(a: Array, bf16: bool = False) -> Array:
    """Hyperbolic tangent. The hardware's bound is a relative error of 2**-11 in f32."""
    return _approximate(np.tanh, a, False, bf16)


# min, max ------------------------------------------------------------------------------------------------------------


def minimum(
    a: Array,
    b: Array,
    c: Array | None = None,
    nan: bool = False,
    xorsign_abs: bool = False,
    magnitude: bool = False,
    ftz: bool = False,
) -> Array:
    """PTX ``min`` of two or three operands; -0 is less than +0.

    A NaN operand is ignored, or makes the result NaN with ``nan=True`` (``.NaN``). ``xorsign_abs`` compares magnitudes
    and sets the sign to the exclusive or of both signs (two operands); ``magnitude`` is ``.abs`` of the three-operand
    form.
    """
    return _extreme(np.minimum if nan else np.fmin, np.bitwise_or, a, b, c, xorsign_abs, magnitude, ftz)


def maximum(
    a: Array,
    b: Array,
    c: Array | None = None,
    nan: bool = False,
    xorsign_abs: bool = False,
    magnitude: bool = False,
    ftz: bool = False,
) -> Array:
    """PTX ``max``; see ``minimum``."""
    return _extreme(np.maximum if nan else np.fmax, np.bitwise_and, a, b, c, xorsign_abs, magnitude, ftz)


@quiet
def _extreme(
    pick: Callable[[Array, Array], Array],
    zeros: Callable[[Array, Array], Array],
    a: Array,
    b: Array,
    c: Array | None,
    xorsign_abs: bool,
    magnitude: bool,
    ftz: bool,
) -> Array:
    if ftz:
        a, b = flush(a), flush(b)
        c = None if c is None else flush(c)
    first, second = (np.abs(a), np.abs(b)) if xorsign_abs or magnitude else (a, b)
    r = _ordered(pick, zeros, first, second)
    if c is not None:
        r = _ordered(pick, zeros, r, np.abs(c) if magnitude else c)
    elif xorsign_abs:
        negative = np.signbit(a) != np.signbit(b)
        r = np.where(negative, -r, r)
    return canonical(r)


def _ordered(
    pick: Callable[[Array, Array], Array], zeros: Callable[[Array, Array], Array], a: Array, b: Array
) -> Array:
    """``pick`` leaves the sign of a zero open. Equal operands differ at most in that sign: or, and of their bits."""
    r = pick(a, b)
    zero = r == 0
    if np.count_nonzero(zero):
        unsigned = f"u{a.dtype.itemsize}"
        both = zeros(a.view(unsigned), b.view(unsigned)).view(a.dtype)
        r = np.where(zero & (a == b), both, r)
    return r
