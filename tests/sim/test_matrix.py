"""mma fragments element by element from the formulas of the PTX ISA, products against torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mkb_env.devices.simulator import matrix

RNG = np.random.default_rng(20261203)
WARPS = 3

# Row and column of element i in a lane's fragment (g = lane >> 2, t = lane % 4), one line per line of the ISA's
# sections "Matrix Fragments for mma.<shape>".
Place = Callable[[int, int, int], tuple[int, int]]
A: dict[tuple[str, int], Place] = {
    ("f16", 8): lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
    ("f16", 16): lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)),
    ("tf32", 4): lambda g, t, i: (g + 8 * i, t),
    ("tf32", 8): lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
    ("s8", 16): lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)),
    ("s8", 32): lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (0 if i < 8 else 16)),
    ("f64", 4): lambda g, t, i: (g + 8 * i, t),
    ("f64", 8): lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
    ("f64", 16): lambda g, t, i: (g, i * 2 + t) if i % 2 == 0 else (g + 8, i * 2 - 2 + t),
}
B: dict[tuple[str, int], Place] = {
    ("f16", 8): lambda g, t, i: (t * 2 + i, g),
    ("f16", 16): lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
    ("tf32", 4): lambda g, t, i: (t, g),
    ("tf32", 8): lambda g, t, i: (t if i == 0 else t + 4, g),
    ("s8", 16): lambda g, t, i: (t * 4 + i, g),
    ("s8", 32): lambda g, t, i: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
    ("f64", 4): lambda g, t, i: (t, g),
    ("f64", 8): lambda g, t, i: (t if i == 0 else t + 4, g),
    ("f64", 16): lambda g, t, i: (t + i * 4, g),
}
FAMILY = {"bf16": "f16", "u8": "s8", "e4m3": "s8", "e5m2": "s8"}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64}
TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "tf32": torch.float32,
    "f32": torch.float32,
    "f64": torch.float64,
    "s8": torch.int8,
    "u8": torch.uint8,
    "s32": torch.int32,
}


def place_c(m: int) -> Place:
    return lambda g, t, i: (g if i < 2 or m == 8 else g + 8, t * 2 + (i & 1))


def place(operand: str, kind: str, m: int, k: int) -> Place:
    if operand == "C":
        return place_c(m)
    if m == 8:  # m8n8k4 f64 and m8n8k16 s8: one register
        per = 1 if kind == "f64" else 4
        return (lambda g, t, i: (g, t * per + i)) if operand == "A" else (lambda g, t, i: (t * per + i, g))
    return (A if operand == "A" else B)[FAMILY.get(kind, kind), k]


def fragments(values: torch.Tensor, kind: str, where: Place) -> list[np.ndarray]:
    """Registers of [warps, rows, columns] values, packed lane by lane, element by element."""
    width = BITS.get(kind, 8)
    bits = values.view({8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}[width]).numpy()
    per, elements = max(1, 32 // width), values.shape[1] * values.shape[2] // 32
    registers = [np.zeros((len(bits), 32), np.uint64 if width == 64 else np.uint32) for _ in range(elements // per)]
    for warp in range(len(bits)):
        for lane in range(32):
            for i in range(elements):
                word = int(bits[(warp, *where(lane >> 2, lane % 4, i))]) << (i % per * width)
                registers[i // per][warp, lane] |= registers[0].dtype.type(word)
    return registers


def matrix_of(registers: list[np.ndarray], kind: str, shape: tuple[int, int], where: Place) -> torch.Tensor:
    """The inverse of ``fragments``."""
    width = BITS[kind]
    per = max(1, 32 // width)
    bits = np.zeros((len(registers[0]), *shape), f"u{width // 8}")
    for warp in range(len(bits)):
        for lane in range(32):
            for i in range(len(registers) * per):
                word = int(registers[i // per][warp, lane]) >> (i % per * width)
                bits[(warp, *where(lane >> 2, lane % 4, i))] = word & ((1 << width) - 1)
    return torch.from_numpy(bits).view(TORCH[kind])


def values(kind: str, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    dtype = TORCH[kind]
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        drawn = RNG.integers(info.min, info.max, (WARPS, rows, columns), endpoint=True)
        return torch.from_numpy(drawn).to(dtype)
    x = torch.from_numpy(RNG.normal(0, scale, (WARPS, rows, columns))).to(dtype)
    if kind == "tf32":
        x = (x.view(torch.int32) & -8192).view(torch.float32)
    return x


FORMS = [
    *(((16, 8, k), t, t, acc, acc) for k in (8, 16) for t, acc in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))),
    ((16, 8, 16), "f16", "f16", "f16", "f32"),
    ((16, 8, 16), "f16", "f16", "f32", "f16"),
    *(((16, 8, k), "tf32", "tf32", "f32", "f32") for k in (4, 8)),
    *((shape, "f64", "f64", "f64", "f64") for shape in ((8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16))),
    *(
        (shape, a, b, "s32", "s32")
        for shape in ((8, 8, 16), (16, 8, 16), (16, 8, 32))
        for a in ("s8", "u8")
        for b in ("s8", "u8")
    ),
    *(
        ((16, 8, k), a, b, acc, acc)
        for k in (16, 32)
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
        for acc in ("f32", "f16")
    ),
]


@pytest.mark.parametrize(
    ("shape", "a", "b", "c", "d"), FORMS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v
)
def test_mma(shape: tuple[int, int, int], a: str, b: str, c: str, d: str) -> None:
    m, n, k = shape
    x, y, z = values(a, m, k), values(b, k, n), values(c, m, n)
    if c == "s32":
        z //= 2
    registers = matrix.mma(
        shape,
        a,
        b,
        c,
        d,
        fragments(x, a, place("A", a, m, k)),
        fragments(y, b, place("B", b, m, k)),
        fragments(z, c, place("C", c, m, k)),
    )
    got = matrix_of(registers, d, (m, n), place("C", d, m, k))
    if d == "s32":
        assert torch.equal(got, (x.long() @ y.long() + z.long()).int())
        return
    exact = x.double() @ y.double() + z.double()
    if d == "f64":
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-14)
    else:
        # Both sums are in float64, in orders of their own: at most the last digit of the result may differ.
        want = exact.to(TORCH[d])
        torch.testing.assert_close(got, want, rtol=float(torch.finfo(TORCH[d]).eps), atol=0)
        assert (got == want).double().mean() > 0.99


def test_every_supported_form_is_tested() -> None:
    types = [*TORCH]
    shapes = {form[0] for form in FORMS} | {(16, 8, 64), (8, 8, 32), (16, 16, 16)}
    found = {
        (s, a, b, c, d)
        for s in shapes
        for a in types
        for b in types
        for c in types
        for d in types
        if matrix.supports(s, a, b, c, d)
    }
    assert found == set(FORMS)


def test_f64_is_a_chain_of_fused_multiply_adds() -> None:
    """1 + 2**-53 * (1 + 2**-30) rounds up, product and sum rounded apart give 1."""
    one, tiny = np.float64(1), 2.0**-53 * (1 + 2.0**-30)
    a = [np.full((1, 32), one).view(np.uint64)]
    b = np.zeros((1, 32))
    b[0, ::4] = tiny * (1 - 2.0**-60)  # row 0 of B
    c = [np.full((1, 32), one).view(np.uint64)] * 2
    got = matrix.mma((8, 8, 4), "f64", "f64", "f64", "f64", a, [b.view(np.uint64)], c)
    assert {float(v) for r in got for v in r.view(np.float64).ravel()} == {1 + 2.0**-52}


def test_integer_saturation() -> None:
    ones = [np.full((1, 32), 0x7F7F7F7F, np.uint32)]
    high = [np.full((1, 32), 0x7FFFFFFF, np.uint32)] * 4
    arguments = ((16, 8, 16), "s8", "s8", "s32", "s32", ones * 2, ones, high)
    assert int(matrix.mma(*arguments)[0][0, 0]) == (0x7FFFFFFF + 16 * 127 * 127) % 2**32
    assert int(matrix.mma(*arguments, satfinite=True)[0][0, 0]) == 0x7FFFFFFF


def test_special_values_and_ignored_tf32_digits() -> None:
    c = [np.zeros((1, 32), np.uint32)] * 4
    infinite = [np.full((1, 32), 0x7C007C00, np.uint32)] * 2
    zero = [np.zeros((1, 32), np.uint32)]
    assert int(matrix.mma((16, 8, 8), "f16", "f16", "f32", "f32", infinite, zero, c)[0][0, 0]) == 0x7FFFFFFF
    large = [np.full((1, 32), 0x7BFF7BFF, np.uint32)]
    half = matrix.mma((16, 8, 8), "f16", "f16", "f16", "f16", large * 2, large, c[:2])
    assert int(half[0][0, 0]) == 0x7C007C00
    exact, dirty = (
        matrix.mma(
            (16, 8, 4), "tf32", "tf32", "f32", "f32", [np.full((1, 32), bits, np.uint32)] * 2, [c[0] + 0x3F800000], c
        )
        for bits in (0x3F800000, 0x3F801FFF)
    )
    np.testing.assert_array_equal(exact, dirty)


def test_refused() -> None:
    r = [np.zeros((1, 32), np.uint32)] * 4
    with pytest.raises(ValueError, match=r"m16n8k16 f32\.f16\.bf16\.f32 is not supported"):
        matrix.mma((16, 8, 16), "f16", "bf16", "f32", "f32", r, r[:2], r)
    with pytest.raises(ValueError, match="B has 4 registers, this form needs 2"):
        matrix.mma((16, 8, 16), "f16", "f16", "f32", "f32", r, r, r)


def test_wide_accumulators() -> None:
    """The m64nN layout of wgmma, of which one warp holds 16 rows: d[i] lies at row g + 8 * (i / 2 % 2), column
    8 * (i / 4) + 2 * t + i % 2.
    """
    layout = matrix.accumulator_layout(16, 64, 32)
    for lane in range(32):
        for i in range(32):
            g, t = lane // 4, lane % 4
            assert layout.rows[lane, i] == g + 8 * (i // 2 % 2)
            assert layout.cols[lane, i] == 8 * (i // 4) + 2 * t + i % 2
    assert matrix.accumulator_layout(16, 64, 16).registers == 16


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_stmatrix(num: int, trans: bool) -> None:
    rows = RNG.integers(0, 1 << 16, (WARPS, num, 8, 8), dtype=np.uint16)
    registers = matrix.ldmatrix(rows, trans)
    assert len(registers) == num
    for warp in range(WARPS):
        for j in range(num):
            for lane in range(32):
                r, c = lane // 4, lane % 4 * 2
                low, high = (rows[warp, j, c, r], rows[warp, j, c + 1, r]) if trans else rows[warp, j, r, c : c + 2]
                assert int(registers[j][warp, lane]) == int(low) | int(high) << 16
    np.testing.assert_array_equal(matrix.stmatrix(registers, trans), rows)


def test_ldmatrix_feeds_mma() -> None:
    """A by ldmatrix.x4 and B by ldmatrix.x2.trans from row-major memory, as kernels do it."""
    x, y = values("f16", 16, 16), values("f16", 16, 8)
    xb, yb = x.view(torch.uint16).numpy(), y.view(torch.uint16).numpy()
    a = matrix.ldmatrix(np.stack([xb[:, :8, :8], xb[:, 8:, :8], xb[:, :8, 8:], xb[:, 8:, 8:]], axis=1))
    b = matrix.ldmatrix(np.stack([yb[:, :8], yb[:, 8:]], axis=1), trans=True)
    c = [np.zeros((WARPS, 32), np.uint32)] * 4
    d = matrix.mma((16, 8, 16), "f16", "f16", "f32", "f32", a, b, c)
    got = matrix_of(d, "f32", (16, 8), place_c(16))
    torch.testing.assert_close(got, (x.double() @ y.double()).float(), rtol=1e-6, atol=0)


def test_movmatrix_transposes() -> None:
    rows = RNG.integers(0, 1 << 16, (WARPS, 1, 8, 8), dtype=np.uint16)
    moved = matrix.movmatrix(matrix.ldmatrix(rows)[0])
    np.testing.assert_array_equal(matrix.stmatrix([moved])[:, 0], rows[:, 0].transpose(0, 2, 1))
