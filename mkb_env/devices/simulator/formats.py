"""The floating-point formats of PTX: values, bits, rounding, and rounding.

Arrays of bits are unsigned integers of the format's width (the 4- and 6-bit formats sit in the low bits of a byte,
tf32 in a 32-bit word with its low 13 bits zero). All functions are elementwise, keep the shape, take arrays of at
least one dimension, and never warn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.simulator.exact import Array

Bits = NDArray[Any]
"""Raw register bits: uint8, uint16, uint32 or uint64."""


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format."""

    name: str
    container: type[np.unsignedinteger]
    mantissa: int
    """Stored mantissa bits."""
    min_exponent: int
    """Exponent of the smallest normal number."""
    max_finite: float
    infinity: bool
    nan: int | None
    """Bits of the NaN that PTX produces; None where the format has no NaN (then NaN becomes ``max_finite``)."""


FORMATS: dict[str, FloatFormat] = {
    f.name: f
    for f in (
        FloatFormat("f64", np.uint64, 52, -1022, float(np.finfo(np.float64).max), True, 0x7FF8000000000000),
        FloatFormat("f32", np.uint32, 23, -126, float(np.finfo(np.float32).max), True, 0x7FFFFFFF),
        FloatFormat("tf32", np.uint32, 10, -126, (2 - 2.0**-10) * 2.0**127, True, 0x7FFFFFFF),
        FloatFormat("bf16", np.uint16, 7, -126, (2 - 2.0**-7) * 2.0**127, True, 0x7FFF),
        FloatFormat("f16", np.uint16, 10, -14, 65504.0, True, 0x7FFF),
        FloatFormat("e5m2", np.uint8, 2, -14, 57344.0, True, 0x7F),
        FloatFormat("e4m3", np.uint8, 3, -6, 448.0, False, 0x7F),
        FloatFormat("e3m2", np.uint8, 2, -2, 28.0, False, None),
        FloatFormat("e2m3", np.uint8, 3, 0, 7.5, False, None),
        FloatFormat("e2m1", np.uint8, 1, 0, 6.0, False, None),
    )
}
"""By PTX type name. ``ue8m0`` (a power of two without a sign) only has an entry in ``decode``."""

TINY_WIDTH = {"e5m2": 8, "e4m3": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}
"""Bits of the formats below 16 bits. ``.satfinite`` is mandatory for conversions to these."""

quiet = np.errstate(all="ignore")
"""Decorator: PTX has no floating-point exceptions."""

_SMALLEST_NORMAL = {np.dtype(t): np.finfo(t).smallest_normal for t in (np.float16, np.float32, np.float64)}


def round_integral(x: Array, rounding: str) -> Array:
    """Round float64 ``x`` to an integral value by rn, rna, rz, rm or rp; the sign of zero is kept."""
    match rounding:
        case "rn":
            return np.rint(x)
        case "rz":
            return np.trunc(x)
        case "rm":
            return np.floor(x)
        case "rp":
            return np.ceil(x)
        case "rna":
            whole = np.trunc(x)
            return whole + np.copysign(np.abs(x - whole) >= 0.5, x)
    raise ValueError(f"rounding {rounding!r} is not one of rn, rna, rz, rm, rp")


@quiet
def round_to_format(x: Array, fmt: FloatFormat, rounding: str, satfinite: bool = False) -> Array:
    """Round float64 ``x`` to ``fmt`` (any but f64) in the given direction; the result is still float64.

    Overflow gives infinity or the largest finite number as IEEE 754 demands for ``rounding``, and the largest finite
    number where ``satfinite`` is set or the format has no infinity. NaN stays NaN.
    """
    # The unit in the last place of each value, as float64 bits: its exponent (at least the format's smallest) less the
    # mantissa's width. Infinity and NaN come out as themselves.
    exponent = x.view(np.int64) & np.int64(0x7FF0000000000000)
    np.maximum(exponent, np.int64((fmt.min_exponent + 1023) << 52), out=exponent)
    exponent -= np.int64(fmt.mantissa << 52)
    unit = exponent.view(np.float64)
    r = round_integral(x / unit, rounding)
    r *= unit
    over = np.abs(r) > fmt.max_finite
    if not np.count_nonzero(over):
        return r
    if satfinite or not fmt.infinity:
        limit: Array = np.full_like(r, fmt.max_finite)
    else:
        up, down = rounding in ("rn", "rna", "rp"), rounding in ("rn", "rna", "rm")
        limit = np.where(np.where(r > 0, up, down) | np.isinf(x), np.inf, fmt.max_finite)
    return np.where(over, np.copysign(limit, r), r)


# Bits and values -----------------------------------------------------------------------------------------------------


@quiet
def encode(x: Array, fmt: FloatFormat) -> Bits:
    """Bits of float64 ``x`` whose values lie in ``fmt``; NaN becomes the format's NaN."""
    if fmt.name in TINY_WIDTH:
        return _encode_tiny(x, fmt)
    if fmt.name == "f64":
        return np.array(x, np.float64).view(np.uint64)
    if fmt.name == "f16":
        bits: Bits = x.astype(np.float16).view(np.uint16)
    else:
        bits = x.astype(np.float32).view(np.uint32)
        if fmt.name == "bf16":
            bits = (bits >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    if np.count_nonzero(nan):
        bits[nan] = fmt.nan
    return bits


def _encode_tiny(x: Array, fmt: FloatFormat) -> Bits:
    nan = np.isnan(x)
    magnitude = np.where(nan, 0.0, np.abs(x))
    finite = np.minimum(magnitude, fmt.max_finite)
    _, exponent = np.frexp(finite)
    exponent = np.where(finite == 0, fmt.min_exponent, np.maximum(exponent - 1, fmt.min_exponent))
    units = np.ldexp(finite, fmt.mantissa - exponent).astype(np.int64)
    # For normal numbers units holds the hidden bit, worth exactly one exponent step.
    code = ((exponent - fmt.min_exponent).astype(np.int64) << fmt.mantissa) + units
    if fmt.infinity:
        code = np.where(np.isinf(magnitude), 0x7C, code)
    width = TINY_WIDTH[fmt.name]
    code |= np.signbit(x).astype(np.int64) << (width - 1)
    # Without a NaN the largest finite number takes its place, which has all magnitude bits set.
    invalid = fmt.nan if fmt.nan is not None else (1 << (width - 1)) - 1
    return np.where(nan, invalid, code).astype(np.uint8)


def _tiny_values(name: str) -> NDArray[np.float64]:
    fmt, width = FORMATS[name], TINY_WIDTH[name]
    codes = np.arange(256)
    magnitude = codes & ((1 << (width - 1)) - 1)
    exponent, fraction = magnitude >> fmt.mantissa, magnitude & ((1 << fmt.mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << fmt.mantissa), fraction).astype(np.float64)
    value = np.ldexp(significand, np.maximum(exponent, 1) - 1 + fmt.min_exponent - fmt.mantissa)
    if name == "e4m3":
        value[magnitude == 0x7F] = np.nan
    if name == "e5m2":
        value[magnitude == 0x7C] = np.inf
        value[magnitude > 0x7C] = np.nan
    return np.where((codes >> (width - 1)) & 1, -value, value)


_VALUES = {name: _tiny_values(name) for name in TINY_WIDTH}
_VALUES["ue8m0"] = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)


@quiet
def decode(bits: Bits, kind: str) -> NDArray[np.float64]:
    """Values of the floating-point type ``kind`` as float64, exactly. Raises ValueError for another type name."""
    table = _VALUES.get(kind)
    if table is not None:
        return table[bits]
    match kind:
        case "f32" | "tf32":
            return bits.view(np.float32).astype(np.float64)
        case "f16":
            return bits.view(np.float16).astype(np.float64)
        case "bf16":
            return bf16_to_f32(bits).astype(np.float64)
        case "f64":
            return bits.view(np.float64)
    raise ValueError(f"{kind!r} is not a floating-point type of PTX that the simulator knows")


def bf16_to_f32(bits: Bits) -> NDArray[np.float32]:
    """Exact; NaN keeps its payload (PTX leaves it open)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def canonical(x: Array) -> Array:
    """Give NaN lanes of a fresh float16 or float32 array the GPU's bits, in place; float64 is left alone."""
    if x.dtype == np.float64:
        return x
    nan = np.isnan(x)
    if np.count_nonzero(nan):
        if x.dtype == np.float32:
            x.view(np.uint32)[nan] = 0x7FFFFFFF
        else:
            x.view(np.uint16)[nan] = 0x7FFF
    return x


def flush(x: Array) -> Array:
    """Replace subnormal numbers of the array's type by zeros of the same sign (``.ftz``)."""
    tiny = np.abs(x) < _SMALLEST_NORMAL[x.dtype]
    if not np.count_nonzero(tiny):
        return x
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x)
