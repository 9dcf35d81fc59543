"""Conversions between the number formats of PTX, on raw register bits.

Formulas and special cases follow the PTX ISA, section ``cvt``. Arrays of bits are unsigned integers of the type's
width (the 4- and 6-bit formats sit in the low bits of a byte, tf32 in a 32-bit word with its low 13 bits zero).
All functions are elementwise, keep the shape, and never warn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
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


_F32_MAX = float(np.finfo(np.float32).max)
FORMATS: dict[str, FloatFormat] = {
    f.name: f
    for f in (
        FloatFormat("f64", np.uint64, 52, -1022, float(np.finfo(np.float64).max), True, 0x7FF8000000000000),
        FloatFormat("f32", np.uint32, 23, -126, _F32_MAX, True, 0x7FFFFFFF),
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
"""By PTX type name. ``ue8m0`` (a power of two, no sign) is treated apart."""

INTEGERS: dict[str, Any] = {
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
}

_TINY_BITS = {"e5m2": 8, "e4m3": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}
_ALWAYS_FINITE = frozenset(_TINY_BITS)
"""Destinations for which ``.satfinite`` is mandatory."""
_INTEGRAL = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF)


# Exact helpers -------------------------------------------------------------------------------------------------------


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
    if not fix.any():
        return s
    # One step away from zero where the error has the sign of s, else one step towards zero.
    step = np.where((e > 0) == (s > 0), 1, -1)
    odd: Array = (bits + np.where(fix, step, 0)).view(np.float64)
    return odd


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


def round_to_format(x: Array, fmt: FloatFormat, rounding: str, satfinite: bool = False) -> Array:
    """Round float64 ``x`` to the nearest values of ``fmt`` in the given direction; the result is still float64.

    Overflow gives infinity or the largest finite number as IEEE 754 demands for ``rounding``, and the largest finite
    number where ``satfinite`` is set or the format has no infinity. NaN stays NaN.
    """
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(x)
        quantum = np.maximum(exponent - 1, fmt.min_exponent) - fmt.mantissa
        # Two steps, because 2**-quantum alone may overflow for subnormal targets.
        half = quantum // 2
        scaled = np.ldexp(np.ldexp(x, -half), half - quantum)
        r = np.ldexp(round_integral(scaled, rounding), quantum)
        r = np.where(np.isfinite(x), r, x)
        over = np.abs(r) > fmt.max_finite
        if not over.any():
            return r
        if satfinite or not fmt.infinity:
            limit: Array = np.full_like(r, fmt.max_finite)
        else:
            up, down = rounding in ("rn", "rna", "rp"), rounding in ("rn", "rna", "rm")
            limit = np.where(np.where(r > 0, up, down) | np.isinf(x), np.inf, fmt.max_finite)
        return np.where(over, np.copysign(limit, r), r)


def _encode(x: Array, fmt: FloatFormat) -> Bits:
    """Bits of float64 ``x`` whose values lie in ``fmt``."""
    if fmt.name == "f64":
        return np.array(x, np.float64).view(np.uint64)
    if fmt.name in _TINY_BITS:
        return _encode_tiny(x, fmt)
    with np.errstate(all="ignore"):
        if fmt.name == "f16":
            bits: Bits = x.astype(np.float16).view(np.uint16)
        else:
            bits = x.astype(np.float32).view(np.uint32)
            if fmt.name == "bf16":
                bits = (bits >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), fmt.container(fmt.nan or 0), bits)


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
    code |= np.signbit(x).astype(np.int64) << (_TINY_BITS[fmt.name] - 1)
    top = FORMATS[fmt.name].nan
    if top is None:
        top = int(_encode_tiny(np.array([fmt.max_finite]), fmt)[0]) if nan.any() else 0
    return np.where(nan, top, code).astype(np.uint8)


def _tiny_table(name: str) -> NDArray[np.float64]:
    fmt, width = FORMATS[name], _TINY_BITS[name]
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


_TABLES = {name: _tiny_table(name) for name in _TINY_BITS}
_TABLES["ue8m0"] = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)


def decode(bits: Bits, kind: str) -> NDArray[np.float64]:
    """Values of the floating-point type ``kind`` as float64, exactly. Raises ValueError for another type name."""
    table = _TABLES.get(kind)
    with np.errstate(all="ignore"):
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


def _encode_ue8m0(x: Array, rounding: str) -> Bits:
    """Upwards (rp) or downwards (rz) to a power of two of 2**-127 to 2**127; the sign is dropped, NaN is 0xff."""
    magnitude, exponent = np.frexp(np.abs(x))
    code = exponent - 1 + 127
    if rounding == "rp":
        code = code + (magnitude > 0.5)
    code = np.where(x == 0, 0, np.where(np.isinf(x), 254, np.clip(code, 0, 254)))
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


# The common conversions ----------------------------------------------------------------------------------------------


def bf16_to_f32(bits: Bits) -> NDArray[np.float32]:
    """Exact; NaN keeps its payload (PTX leaves it open)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: NDArray[np.float32], rounding: str = "rn") -> NDArray[np.uint16]:
    """Round float32 to bf16 bits by rn, rna, rz, rm or rp. NaN becomes 0x7fff."""
    if rounding != "rn":
        return _encode(round_to_format(x.astype(np.float64), FORMATS["bf16"], rounding), FORMATS["bf16"])
    bits = x.view(np.uint32)
    half = np.uint32(16)
    out = ((bits + (np.uint32(0x7FFF) + ((bits >> half) & np.uint32(1)))) >> half).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FFF
    return out


def f16_to_f32(bits: Bits) -> NDArray[np.float32]:
    """Exact; NaN becomes the canonical NaN of f32."""
    with np.errstate(all="ignore"):
        return canonical(bits.view(np.float16).astype(np.float32))


def f32_to_f16(x: NDArray[np.float32], rounding: str = "rn") -> NDArray[np.uint16]:
    """Round float32 to f16 bits by rn, rna, rz, rm or rp. NaN becomes 0x7fff."""
    if rounding != "rn":
        return _encode(round_to_format(x.astype(np.float64), FORMATS["f16"], rounding), FORMATS["f16"])
    with np.errstate(all="ignore"):
        out: NDArray[np.uint16] = canonical(x.astype(np.float16)).view(np.uint16)
    return out


def canonical(x: Array) -> Array:
    """Give NaN lanes of a fresh float16 or float32 array PTX's canonical bits, in place; float64 is left alone."""
    if x.dtype == np.float64:
        return x
    nan = np.isnan(x)
    if nan.any():
        if x.dtype == np.float32:
            x.view(np.uint32)[nan] = CANONICAL_NAN_F32
        else:
            x.view(np.uint16)[nan] = 0x7FFF
    return x


def flush(x: Array, smallest_normal: float | None = None) -> Array:
    """Replace subnormal numbers by zeros of the same sign (``.ftz``)."""
    tiny = np.abs(x) < (np.finfo(x.dtype).smallest_normal if smallest_normal is None else smallest_normal)
    if not tiny.any():
        return x
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x)


# cvt -----------------------------------------------------------------------------------------------------------------


def _f32_to_int(bits: Bits, low: float, high: float, signed: type, round_off: Callable[[Array], Array]) -> Bits:
    """Of f32 to a 32-bit integer: exact in float64, out of range clamps, NaN becomes 0."""
    with np.errstate(all="ignore"):
        x = round_off(bits.view(np.float32).astype(np.float64))
    np.clip(x, low, high, out=x)
    nan = np.isnan(x)
    if nan.any():
        x[nan] = 0
    return x.astype(signed).view(np.uint32)


def _int_to_f32(bits: Bits, kind: type) -> Bits:
    return bits.view(kind).astype(np.float32).view(np.uint32)


_S32, _U32 = (-(2.0**31), 2.0**31 - 1), (0.0, 2.0**32 - 1)
_FAST: dict[tuple[str, str, str | None], Callable[[Bits], Bits]] = {
    ("f32", "bf16", "rn"): lambda v: f32_to_bf16(v.view(np.float32)),
    ("bf16", "f32", None): lambda v: canonical(bf16_to_f32(v)).view(np.uint32),
    ("f32", "f16", "rn"): lambda v: f32_to_f16(v.view(np.float32)),
    ("f16", "f32", None): lambda v: f16_to_f32(v).view(np.uint32),
    ("s32", "f32", "rn"): lambda v: _int_to_f32(v, np.int32),
    ("u32", "f32", "rn"): lambda v: _int_to_f32(v, np.uint32),
    ("f32", "s32", "rzi"): lambda v: _f32_to_int(v, *_S32, np.int32, np.trunc),
    ("f32", "s32", "rni"): lambda v: _f32_to_int(v, *_S32, np.int32, np.rint),
    ("f32", "u32", "rzi"): lambda v: _f32_to_int(v, *_U32, np.uint32, np.trunc),
    ("f32", "u32", "rni"): lambda v: _f32_to_int(v, *_U32, np.uint32, np.rint),
}


def cvt(
    values: Bits,
    src: str,
    dst: str,
    rounding: str | None = None,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    satfinite: bool = False,
) -> Bits:
    """Convert register bits of type ``src`` to bits of type ``dst`` as PTX ``cvt`` does.

    Types: s8 to u64, f16, bf16, tf32, f32, f64, e4m3, e5m2, e3m2, e2m3, e2m1, ue8m0. Float to integer clamps; NaN
    becomes 0, or 2**(width-1) where the source is f64 or the destination has 64 bits. fp8, fp6 and fp4 destinations
    always saturate to finite values. ``sat`` limits floating-point results to [+0, 1] (NaN to +0) and integer results
    to the destination's range; ``relu`` turns negative results and -0 into +0. f32 NaN results are 0x7fffffff.

    Raises ValueError for an unknown type, or where a mandatory rounding is missing.
    """
    if not (ftz or sat or relu or satfinite):
        fast = _FAST.get((src, dst, rounding))
        if fast is not None:
            return fast(values)
    if src in INTEGERS:
        exact = values.view(INTEGERS[src])
        return _int_to_int(exact, dst, sat) if dst in INTEGERS else _int_to_float(exact, dst, rounding, sat)
    x = decode(values, src)
    if ftz and src == "f32":
        x = flush(x, 2.0**-126)
    if dst in INTEGERS:
        return _float_to_int(x, src, dst, rounding)
    if rounding in _INTEGRAL:
        x, rounding = round_integral(x, _INTEGRAL[rounding]), None
    return _float_to_float(x, src, dst, rounding, ftz, sat, relu, satfinite)


def _int_to_int(exact: Array, dst: str, sat: bool) -> Bits:
    target = INTEGERS[dst]
    if sat:
        info, own = np.iinfo(target), np.iinfo(exact.dtype)
        exact = np.clip(exact, max(info.min, own.min), min(info.max, own.max))
    return exact.astype(target).view(f"u{np.dtype(target).itemsize}")


def _int_to_float(exact: Array, dst: str, rounding: str | None, sat: bool) -> Bits:
    if rounding is None:
        raise ValueError(f"cvt of an integer to {dst} needs a rounding modifier (rn, rz, rm, rp), got none")
    if dst not in FORMATS:
        raise ValueError(f"cvt to {dst!r}: not a type of PTX that the simulator knows")
    if exact.dtype.itemsize < 8:
        x = exact.astype(np.float64)
    else:
        word = exact.dtype.type(32)
        high, low = (exact >> word).astype(np.float64) * 2.0**32, (exact & exact.dtype.type(0xFFFFFFFF))
        s, e = two_sum(high, low.astype(np.float64))
        x = direct(s, e, rounding) if dst == "f64" else to_odd(s, e)
    if sat:
        x = np.clip(x, 0.0, 1.0)
    return _encode(round_to_format(x, FORMATS[dst], rounding), FORMATS[dst])


def direct(r: Array, error: Array, rounding: str) -> Array:
    """Turn ``r``, a result rounded to nearest, into the one rounded by ``rounding``.

    ``error`` has the sign of the exact result minus ``r`` (NaN where ``r`` is infinite or NaN; those lanes stay).
    """
    zero, inf = r.dtype.type(0), r.dtype.type(np.inf)
    match rounding:
        case "rn":
            return r
        case "rz":
            return np.where((error != 0) & ((error < 0) == (r > 0)) & ~np.isnan(error), np.nextafter(r, zero), r)
        case "rm":
            return np.where(error < 0, np.nextafter(r, -inf), r)
        case "rp":
            return np.where(error > 0, np.nextafter(r, inf), r)
    raise ValueError(f"rounding {rounding!r} is not one of rn, rz, rm, rp")


def _float_to_int(x: Array, src: str, dst: str, rounding: str | None) -> Bits:
    if rounding not in _INTEGRAL:
        raise ValueError(f"cvt of {src} to {dst} needs rni, rzi, rmi or rpi, got {rounding}")
    target = INTEGERS[dst]
    info, width = np.iinfo(target), np.dtype(target).itemsize * 8
    r = round_integral(x, _INTEGRAL[rounding])
    nan, high, low = np.isnan(r), r >= 2.0 ** (width - (info.min < 0)), r <= float(info.min)
    out = np.where(nan | high | low, 0.0, r).astype(target)
    out[high] = info.max
    out[low] = info.min
    bits: Bits = out.view(f"u{width // 8}")
    if src == "f64" or width == 64:
        bits[nan] = 1 << (width - 1)
    return bits


def _float_to_float(
    x: Array, src: str, dst: str, rounding: str | None, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Bits:
    if dst == "ue8m0":
        if rounding not in ("rz", "rp"):
            raise ValueError(f"cvt of {src} to ue8m0 needs rz or rp, got {rounding}")
        return _encode_ue8m0(x, rounding)
    if dst not in FORMATS:
        raise ValueError(f"cvt to {dst!r}: not a type of PTX that the simulator knows")
    fmt = FORMATS[dst]
    if sat:
        x = np.where(np.isnan(x) | (x <= 0), 0.0, np.minimum(x, 1.0))
    if relu:
        x = np.where(x <= 0, 0.0, x)
    satfinite = satfinite or dst in _ALWAYS_FINITE
    origin = FORMATS.get(src)
    if origin is None or origin.mantissa > fmt.mantissa or origin.min_exponent < fmt.min_exponent or satfinite:
        if rounding is None and not (src == "ue8m0" or src == dst):
            raise ValueError(f"cvt of {src} to {dst} loses digits and needs a rounding modifier, got none")
        x = round_to_format(x, fmt, rounding or "rn", satfinite)
    bits = _encode(x, fmt)
    if ftz and dst == "f32":
        bits = flush(bits.view(np.float32)).view(np.uint32)
    return bits


# Packed forms --------------------------------------------------------------------------------------------------------

_PACKED_LANE = {"f16": (16, np.uint32), "bf16": (16, np.uint32), "e2m1": (4, np.uint8), "ue8m0": (8, np.uint16)}
_PACKED_LANE |= dict.fromkeys(("e4m3", "e5m2", "e3m2", "e2m3"), (8, np.uint16))


def pack2(
    a: Bits, b: Bits, src: str, dst: str, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> Bits:
    """Convert two registers and pack them, ``a`` in the upper half: ``cvt.rn.bf16x2.f32 d, a, b`` and its kin.

    ``src`` and ``dst`` name one lane (``f32``, ``bf16``). Returns uint32 for 16-bit lanes, uint16 for 8- and 6-bit
    lanes, uint8 for e2m1. Raises ValueError for a destination without a packed form.
    """
    if dst not in _PACKED_LANE:
        raise ValueError(f"cvt to {dst}x2: no such packed type; expected one of {', '.join(sorted(_PACKED_LANE))}")
    width, container = _PACKED_LANE[dst]
    high = cvt(a, src, dst, rounding, relu=relu, satfinite=satfinite).astype(container)
    low = cvt(b, src, dst, rounding, relu=relu, satfinite=satfinite).astype(container)
    return (high << container(width)) | low


def unpack2(values: Bits, kind: str) -> tuple[Bits, Bits]:
    """Split packed register bits of two ``kind`` lanes into (upper, lower) bits of ``kind``."""
    if kind not in _PACKED_LANE:
        raise ValueError(f"{kind}x2: no such packed type; expected one of {', '.join(sorted(_PACKED_LANE))}")
    width, container = _PACKED_LANE[kind]
    lane = np.uint16 if width == 16 else np.uint8
    values = values.astype(container)
    return (values >> container(width)).astype(lane), (values & container((1 << width) - 1)).astype(lane)


def cvt_packed(
    values: Bits, src: str, dst: str, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> Bits:
    """Convert both lanes of a packed register: ``cvt.rn.f16x2.e4m3x2``, ``cvt.rn.satfinite.e4m3x2.f16x2``, ..."""
    high, low = unpack2(values, src)
    return pack2(high, low, src, dst, rounding, relu, satfinite)
