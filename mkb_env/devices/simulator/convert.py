"""PTX ``cvt``: conversions between the number formats of PTX, on raw register bits.

Semantics follow the PTX ISA, section ``cvt``. ``formats`` says how bits are held; all functions are elementwise, keep
the shape, and never warn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.simulator.exact import direct, to_odd, two_sum
from mkb_env.devices.simulator.formats import (
    FORMATS,
    TINY_WIDTH,
    Array,
    Bits,
    bf16_to_f32,
    canonical,
    decode,
    encode,
    flush,
    quiet,
    round_integral,
    round_to_format,
)

__all__ = [
    "INTEGERS",
    "bf16_to_f32",
    "cvt",
    "cvt_packed",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "flush",
    "pack2",
    "unpack2",
]

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
_INTEGRAL = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


def _encode_ue8m0(x: Array, rounding: str) -> Bits:
    """Upwards (rp) or downwards (rz) to a power of two of 2**-127 to 2**127; the sign is dropped, NaN is 0xff."""
    magnitude, exponent = np.frexp(np.abs(x))
    code = exponent - 1 + 127
    if rounding == "rp":
        code = code + (magnitude > 0.5)
    code = np.where(x == 0, 0, np.where(np.isinf(x), 254, np.clip(code, 0, 254)))
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


# The common conversions ----------------------------------------------------------------------------------------------


def f32_to_bf16(x: NDArray[np.float32], rounding: str = "rn") -> NDArray[np.uint16]:
    """Round float32 to bf16 bits by rn, rna, rz, rm or rp. NaN becomes 0x7fff."""
    if rounding != "rn":
        return encode(round_to_format(x.astype(np.float64), FORMATS["bf16"], rounding), FORMATS["bf16"])
    bits, half = x.view(np.uint32), np.uint32(16)
    # Just below half a unit, and the last kept bit for ties: a carry into the upper half rounds up.
    carry = bits >> half
    carry &= np.uint32(1)
    carry += np.uint32(0x7FFF)
    carry += bits
    out = (carry >> half).astype(np.uint16)
    nan = np.isnan(x)
    if np.count_nonzero(nan):
        out[nan] = 0x7FFF
    return out


@quiet
def f16_to_f32(bits: Bits) -> NDArray[np.float32]:
    """Exact; NaN becomes the canonical NaN of f32."""
    return canonical(bits.view(np.float16).astype(np.float32))


@quiet
def f32_to_f16(x: NDArray[np.float32], rounding: str = "rn") -> NDArray[np.uint16]:
    """Round float32 to f16 bits by rn, rna, rz, rm or rp. NaN becomes 0x7fff."""
    if rounding != "rn":
        return encode(round_to_format(x.astype(np.float64), FORMATS["f16"], rounding), FORMATS["f16"])
    out: NDArray[np.uint16] = canonical(x.astype(np.float16)).view(np.uint16)
    return out


@cache
def _tiny_of_bf16(dst: str) -> NDArray[np.uint8]:
    """The fp8, fp6 or fp4 code of each of the 65536 bf16 numbers, rounded to nearest even and saturated."""
    every = decode(np.arange(1 << 16, dtype=np.uint16), "bf16")
    return encode(round_to_format(every, FORMATS[dst], "rn", True), FORMATS[dst])


def _f32_to_tiny(bits: Bits, dst: str) -> Bits:
    """By way of bf16 rounded to odd, which has the two digits more than any of these formats that this needs."""
    sticky = (bits & np.uint32(0xFFFF)) != 0
    return _tiny_of_bf16(dst)[(bits >> np.uint32(16)) | sticky]


# cvt -----------------------------------------------------------------------------------------------------------------


@quiet
def _f32_to_int(bits: Bits, low: float, high: float, signed: type, round_off: Callable[[Array], Array]) -> Bits:
    """Of f32 to a 32-bit integer: exact in float64, out of range clamps, NaN becomes 0."""
    x = round_off(bits.view(np.float32).astype(np.float64))
    np.clip(x, low, high, out=x)
    nan = np.isnan(x)
    if np.count_nonzero(nan):
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
    if dst in TINY_WIDTH and src == "f32" and rounding == "rn" and not (ftz or sat or relu):
        return _f32_to_tiny(values, dst)
    return _convert(values, src, dst, rounding, ftz, sat, relu, satfinite)


@quiet
def _convert(
    values: Bits, src: str, dst: str, rounding: str | None, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Bits:
    if src in INTEGERS:
        exact = values.view(INTEGERS[src])
        return _int_to_int(exact, dst, sat) if dst in INTEGERS else _int_to_float(exact, dst, rounding, sat)
    x = decode(flush(values.view(np.float32)).view(np.uint32) if ftz and src == "f32" else values, src)
    if dst in INTEGERS:
        return _float_to_int(x, src, dst, rounding)
    if rounding in _INTEGRAL:
        x, rounding = round_integral(x, _INTEGRAL[rounding]), None
    return _float_to_float(x, src, dst, rounding, ftz, sat, relu, satfinite)


def _int_to_int(exact: Array, dst: str, sat: bool) -> Bits:
    target = INTEGERS[dst]
    if sat:
        info, own = np.iinfo(target), np.iinfo(exact.dtype)
        exact = np.clip(exact, max(int(info.min), int(own.min)), min(int(info.max), int(own.max)))
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
    return encode(x if dst == "f64" else round_to_format(x, FORMATS[dst], rounding), FORMATS[dst])


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
    satfinite = satfinite or dst in TINY_WIDTH
    if src != dst and dst != "f64":
        origin = FORMATS.get(src)
        loses = origin is not None and (origin.mantissa > fmt.mantissa or origin.min_exponent < fmt.min_exponent)
        if loses and rounding is None:
            raise ValueError(f"cvt of {src} to {dst} loses digits and needs a rounding modifier, got none")
        x = round_to_format(x, fmt, rounding or "rn", satfinite)
    bits = encode(x, fmt)
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
