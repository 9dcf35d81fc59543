"""Error-free transformations and exact evaluation, the tools of correct rounding. Nothing here warns by itself."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return float64 ``s = a + b`` (nearest even) and the exact error ``e``, ``a + b == s + e`` (Knuth).

    ``e`` is NaN where ``s`` is not finite.
    """
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def to_odd(s: Array, e: Array) -> Array:
    """Return ``s + e`` rounded to odd, where float64 ``s`` is ``s + e`` rounded to nearest and ``e`` its exact error.

    A value rounded to odd keeps its place against every number of a format with two bits fewer, so that rounding it
    once more to such a format equals one single rounding (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums", 2008).
    """
    bits = s.view(np.int64)
    fix = (e != 0) & ((bits & 1) == 0) & np.isfinite(s)
    if not np.count_nonzero(fix):
        return s
    # One step away from zero where the error has the sign of s, else one step towards zero.
    step = np.where((e > 0) == (s > 0), 1, -1)
    odd: Array = (bits + np.where(fix, step, 0)).view(np.float64)
    return odd


def direct(r: Array, error: Array, rounding: str) -> Array:
    """Turn ``r``, a result rounded to nearest, into the one rounded by rn, rz, rm or rp.

    ``error`` has the sign of the exact result minus ``r``; 0 or NaN leave a lane as it is. Raises ValueError for
    another rounding.
    """
    zero, inf = r.dtype.type(0), r.dtype.type(np.inf)
    match rounding:
        case "rn":
            return r
        case "rz":
            beyond = ((error < 0) & (r > 0)) | ((error > 0) & (r < 0))
            return np.where(beyond, np.nextafter(r, zero), r)
        case "rm":
            return np.where(error < 0, np.nextafter(r, -inf), r)
        case "rp":
            return np.where(error > 0, np.nextafter(r, inf), r)
    raise ValueError(f"rounding {rounding!r} is not one of rn, rz, rm, rp")


_SPLIT = 134217729.0  # 2**27 + 1


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """``a * b == p + e`` exactly (Dekker, Veltkamp), for magnitudes within 2**-480 and 2**480 or zero."""
    p = a * b
    t = _SPLIT * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = _SPLIT * b
    b_high = t - (t - b)
    b_low = b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def rounded(op: Callable[..., Any], plain: Array, rounding: str, *operands: Array) -> Array:
    """Evaluate ``op`` lane by lane in rational arithmetic and round it once to float64.

    ``plain`` is the host's result: it stays where an operand is not finite or the exact result is zero. Slow (about
    3 us a lane); kernels hardly use the operations that come here.
    """
    operands = np.broadcast_arrays(*operands)
    out = np.array(plain, np.float64, order="C")
    flat, lanes = out.reshape(-1), [o.reshape(-1) for o in operands]
    usable = np.logical_and.reduce([np.isfinite(o) for o in lanes])
    for i in np.flatnonzero(usable):
        exact = op(*(Fraction(float(o[i])) for o in lanes))
        if exact:
            flat[i] = _round_fraction(exact, rounding)
    return out


def _round_fraction(exact: Fraction, rounding: str) -> float:
    """Round a non-zero rational to float64 by rn, rz, rm or rp."""
    try:
        r = float(exact)  # nearest even, also for subnormal numbers
    except OverflowError:
        r = np.inf if exact > 0 else -np.inf
    if rounding == "rn":
        return r
    if np.isinf(r):
        sign = -1.0 if exact > 0 else 1.0
    else:
        sign = float((exact > Fraction(r)) - (exact < Fraction(r)))
    return float(direct(np.array([r]), np.array([sign]), rounding)[0])
