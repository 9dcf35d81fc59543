"""Warp-level matrix instructions: ``mma.sync``, ``ldmatrix``, ``stmatrix``, ``movmatrix``.

Layouts are those of the PTX ISA, section "Matrix Fragments for mma": with ``g = lane // 4`` and ``t = lane % 4``, all
shapes from m8n8k4 (f64) and m16n8k4 up follow one pattern, in which a 32-bit register holds ``per`` neighbours along
k (A, B) or n (C, D). Registers are arrays of shape [warps, 32] of uint32, or uint64 for f64.

The layout functions know nothing of the multiplication: a wgmma accumulator is four warps of ``accumulator_layout``
with a larger n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mkb_env.devices.simulator import numerics
from mkb_env.devices.simulator.formats import Array, canonical, decode

_WIDTH = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "s32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8}


@dataclass(frozen=True)
class Layout:
    """Which element of a matrix each lane holds: ``rows`` and ``cols`` of shape [32, elements], in register order.

    Element ``i`` of a lane sits in register ``i // per``, at bit ``(i % per) * width``.
    """

    rows: NDArray[np.intp]
    cols: NDArray[np.intp]
    shape: tuple[int, int]
    per: int
    """Elements in one register."""
    held: NDArray[np.intp]
    """Position in the matrix (row-major) of each element of all registers, ordered by register, lane, place."""
    found: NDArray[np.intp]
    """The inverse permutation of ``held``."""

    @property
    def registers(self) -> int:
        """Registers of a lane."""
        return self.rows.shape[1] // self.per


def _grid(registers: int, per: int) -> tuple[Array, Array, Array, Array]:
    """g, t, register and position within the register, broadcastable to [32, registers * per]."""
    lane, element = np.arange(32)[:, None], np.arange(registers * per)[None, :]
    return lane // 4, lane % 4, element // per, element % per


def _layout(rows: Array, cols: Array, shape: tuple[int, int], per: int) -> Layout:
    rows, cols = np.broadcast_arrays(rows, cols)
    held = (rows * shape[1] + cols).reshape(32, -1, per).swapaxes(0, 1).ravel()
    return Layout(rows, cols, shape, per, held, np.argsort(held))


@cache
def a_layout(m: int, k: int, width: int) -> Layout:
    """Multiplicand A, m (8 or 16) x k, of elements of ``width`` bits: first down the rows, then along k."""
    per = max(1, 32 // width)
    halves = m // 8
    g, t, register, position = _grid(halves * k // (4 * per), per)
    return _layout(g + 8 * (register % halves), register // halves * (4 * per) + t * per + position, (m, k), per)


@cache
def b_layout(k: int, n: int, width: int) -> Layout:
    """Multiplicand B, k x 8."""
    per = max(1, 32 // width)
    g, t, register, position = _grid(k // (4 * per), per)
    return _layout(register * (4 * per) + t * per + position, g, (k, n), per)


@cache
def accumulator_layout(m: int, n: int, width: int) -> Layout:
    """Accumulators C and D, m (8 or 16) x n (a multiple of 8): pairs along n, then rows, then blocks of 8 columns."""
    per = max(1, 32 // width)
    halves = m // 8
    g, t, register, position = _grid(halves * n // 8 * 2 // per, per)
    element = register * per + position
    pair = element // 2
    return _layout(g + 8 * (pair % halves), pair // halves * 8 + 2 * t + element % 2, (m, n), per)


def gather(registers: Sequence[Array], layout: Layout, width: int) -> Array:
    """Bits of the matrix, [warps, rows, columns], out of its fragments. The host must be little-endian."""
    bits = np.concatenate(registers, axis=1).view(f"u{width // 8}")
    return bits.take(layout.found, axis=1).reshape(-1, *layout.shape)


def scatter(matrix: Array, layout: Layout) -> list[Array]:
    """Fragments of a matrix of bits [warps, rows, columns]: the inverse of ``gather``."""
    bits = matrix.reshape(len(matrix), -1).take(layout.held, axis=1)
    words = bits.view(np.uint64 if bits.dtype.itemsize == 8 else np.uint32)
    return [words[:, i : i + 32] for i in range(0, words.shape[1], 32)]


# mma.sync ------------------------------------------------------------------------------------------------------------

_FORMS: dict[tuple[str, str], tuple[tuple[int, int, int], ...]] = {
    ("f16", "f32"): ((16, 8, 8), (16, 8, 16)),
    ("f16", "f16"): ((16, 8, 8), (16, 8, 16)),
    ("bf16", "f32"): ((16, 8, 8), (16, 8, 16)),
    ("tf32", "f32"): ((16, 8, 4), (16, 8, 8)),
    ("f64", "f64"): ((8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)),
    ("i8", "s32"): ((8, 8, 16), (16, 8, 16), (16, 8, 32)),
    ("f8", "f32"): ((16, 8, 16), (16, 8, 32)),
    ("f8", "f16"): ((16, 8, 16), (16, 8, 32)),
}
"""Shapes by the multiplicands' class and the accumulators' type."""
_CLASS = {"s8": "i8", "u8": "i8", "e4m3": "f8", "e5m2": "f8"}


@cache
def supports(shape: tuple[int, int, int], a_type: str, b_type: str, c_type: str, d_type: str) -> bool:
    """Whether ``mma`` takes this form of ``mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>``."""
    kind = _CLASS.get(a_type, a_type)
    same = _CLASS.get(b_type, b_type) == kind
    mixed = kind == "f16" and shape == (16, 8, 16) and {c_type, d_type} <= {"f16", "f32"}
    return same and (c_type == d_type or mixed) and shape in _FORMS.get((kind, d_type), ())


def mma(
    shape: tuple[int, int, int],
    a_type: str,
    b_type: str,
    c_type: str,
    d_type: str,
    a: Sequence[Array],
    b: Sequence[Array],
    c: Sequence[Array],
    satfinite: bool = False,
    rounding: str = "rn",
) -> list[Array]:
    """``D = A * B + C`` for A row-major and B column-major; ``shape`` is (m, n, k).

    ``a``, ``b``, ``c`` and the result are lists of registers, [warps, 32] of uint32 (uint64 for f64). Floating point:
    products exact, their sum and C in float64, one rounding to the accumulator's type; NaN is canonical. The hardware
    adds in an order and with a truncation that the ISA leaves open, so that its f32 results differ by some units in
    the last place of the largest term. f64 is a chain of fused multiply-adds along k with ``rounding``. Integer sums
    wrap, or clamp with ``satfinite``. Of tf32 words the low 13 bits are ignored.

    Raises ValueError for a form that is not supported or a wrong number of registers.
    """
    if not supports(shape, a_type, b_type, c_type, d_type):
        raise ValueError(f"mma m{shape[0]}n{shape[1]}k{shape[2]} {d_type}.{a_type}.{b_type}.{c_type} is not supported")
    m, n, k = shape
    layouts = (
        a_layout(m, k, _WIDTH[a_type]),
        b_layout(k, n, _WIDTH[b_type]),
        accumulator_layout(m, n, _WIDTH[c_type]),
    )
    for name, registers, layout in zip("ABC", (a, b, c), layouts, strict=True):
        if len(registers) != layout.registers:
            raise ValueError(f"mma: {name} has {len(registers)} registers, this form needs {layout.registers}")
    types = (a_type, b_type, c_type)
    left, right, start = (values(gather(r, x, _WIDTH[t]), t) for r, x, t in zip((a, b, c), layouts, types, strict=True))
    return scatter(multiply(left, right, start, d_type, satfinite, rounding), accumulator_layout(m, n, _WIDTH[d_type]))


def values(bits: Array, kind: str) -> Array:
    """Operands of a matrix product as float64, exactly; of tf32 words the low 13 bits are dropped."""
    match kind:
        case "s8" | "s32":
            return bits.view(f"i{bits.dtype.itemsize}").astype(np.float64)
        case "u8":
            return bits.astype(np.float64)
        case "tf32":
            return decode(bits & np.uint32(0xFFFFE000), kind)
    return decode(bits, kind)


def multiply(a: Array, b: Array, c: Array, kind: str, satfinite: bool = False, rounding: str = "rn") -> Array:
    """Bits of ``a @ b + c`` in ``kind``; float64 matrices [warps, m, k], [warps, k, n], [warps, m, n]."""
    if kind == "f64":
        for i in range(a.shape[2]):
            c = numerics.fma(a[:, :, i, None], b[:, None, i, :], c, rounding)
        return np.ascontiguousarray(c).view(np.uint64)
    with np.errstate(all="ignore"):
        total = a @ b + c
        if kind == "s32":
            # At most 33 bits, exact in float64.
            total = np.clip(total, -(2.0**31), 2.0**31 - 1) if satfinite else total
            return total.astype(np.int64).astype(np.uint32)
        return canonical(total.astype(np.float16 if kind == "f16" else np.float32)).view(f"u{_WIDTH[kind] // 8}")


# ldmatrix, stmatrix, movmatrix ---------------------------------------------------------------------------------------


def ldmatrix(rows: NDArray[np.uint16], trans: bool = False) -> list[NDArray[np.uint32]]:
    """Distribute 8x8 matrices of 16-bit elements over the lanes of a warp.

    ``rows`` is [warps, num, 8, 8]: row ``r`` of matrix ``j`` is the 16 bytes at the address that lane ``8 * j + r``
    gives. Returns ``num`` registers [warps, 32]: lane ``l`` gets elements ``2 * (l % 4)`` and one more of row
    ``l // 4`` (``trans``: of column ``l // 4``), the first in the low half.
    """
    matrices = np.ascontiguousarray(rows.swapaxes(2, 3) if trans else rows)
    words = matrices.view(np.uint32).reshape(*rows.shape[:2], 32)
    return [np.ascontiguousarray(words[:, j]) for j in range(rows.shape[1])]


def stmatrix(registers: Sequence[NDArray[np.uint32]], trans: bool = False) -> NDArray[np.uint16]:
    """Collect the rows to store, [warps, num, 8, 8], from ``num`` registers: the inverse of ``ldmatrix``."""
    words = np.stack(registers, axis=1)
    rows = words.view(np.uint16).reshape(*words.shape[:2], 8, 8)
    return np.ascontiguousarray(rows.swapaxes(2, 3)) if trans else rows


def movmatrix(register: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Transpose an 8x8 matrix of 16-bit elements across a warp; [warps, 32] to [warps, 32]."""
    return ldmatrix(stmatrix([register]), trans=True)[0]
