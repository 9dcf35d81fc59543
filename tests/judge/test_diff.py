"""The guessed pattern names the planted fault."""

import math
from collections.abc import Callable

import pytest
import torch
import toy

from mkb_env.judge import diff, tolerance
from mkb_env.judge.verdict import MAX_MESSAGE


def unwritten(*where: slice | int) -> Callable[[torch.Tensor], torch.Tensor]:
    def fault(want: torch.Tensor) -> torch.Tensor:
        want.view(torch.int16)[where] = -1
        return want

    return fault


def changed(*where: slice | int, by: float = 3.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every chosen element is moved by at least ``by``, without any order."""

    def fault(want: torch.Tensor) -> torch.Tensor:
        part = want[where]
        signs = torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).sign()
        want[where] = (part + by * signs * (1 + torch.rand(part.shape))).to(want.dtype)
        return want

    return fault


def noisy(want: torch.Tensor) -> torch.Tensor:
    return want * (1 + 0.02 * torch.randn(want.shape)).to(want.dtype)


def spared(want: torch.Tensor) -> torch.Tensor:
    got = changed(EVERY)(want.clone())
    got[:, 99] = want[:, 99]
    return got


def halves(want: torch.Tensor) -> torch.Tensor:
    return want.unflatten(-1, (2, -1)).transpose(-1, -2).reshape(want.shape)


def columns_and_factor(want: torch.Tensor) -> torch.Tensor:
    return unwritten(EVERY, slice(96, 128))(want * 2)


EVERY = slice(None)
COLUMNS = (
    "1536 of the wrong elements were never written: columns 96 to 127 of axis 1 (256), a multiple of 32 aligned to it. "
    "The others: a constant factor: got is about 2 times what was wanted; nearly everywhere else"
)
TAIL = "not written (the fill pattern is still there): 2048 of 12288 elements (16.7 %): the last 8 rows of axis 0 (48)"
TILE = (
    "rows 16 to 31 of axis 0 (48), a multiple of 16 aligned to it "
    "and columns 64 to 127 of axis 1 (256), a multiple of 64 aligned to it"
)
MATRIX = (48, 256)
HEADS = (4, 8, 64)
FAULTS = {
    "nothing": (MATRIX, unwritten(EVERY), "nothing was written"),
    "tail rows": (MATRIX, unwritten(slice(40, None)), TAIL),
    "tail columns": (MATRIX, unwritten(EVERY, slice(250, None)), "the last 6 columns of axis 1 (256)"),
    "middle columns": (MATRIX, unwritten(EVERY, slice(96, 128)), "columns 96 to 127 of axis 1 (256)"),
    "columns and factor": (MATRIX, columns_and_factor, COLUMNS),
    "one row": (MATRIX, unwritten(17), "row 17 of axis 0 (48)"),
    "every 4th column": (MATRIX, unwritten(EVERY, slice(1, None, 4)), "every 4th column of axis 1 (256), from 1"),
    "first block": (MATRIX, changed(slice(0, 16)), "the first 16 rows of axis 0 (48)"),
    "tile": (MATRIX, changed(slice(16, 32), slice(64, 128)), TILE),
    "one head": (HEADS, changed(EVERY, 5), "index 5 of axis 1 (8)"),
    "two heads": (HEADS, changed(EVERY, slice(5, None, 2)), "indices 5, 7 of axis 1 (8)"),
    "one element": (MATRIX, changed(slice(3, 4), slice(9, 10)), "a single element"),
    "all but a row": (MATRIX, changed(slice(1, None)), "everything but row 0 of axis 0 (48)"),
    "all but a middle column": (MATRIX, spared, "everything but column 99 of axis 1 (256)"),
    "zeros": (MATRIX, lambda w: w * 0, "all wrong elements are 0"),
    "NaN": (MATRIX, lambda w: torch.full_like(w, math.nan), "all wrong elements are NaN"),
    "doubled": (MATRIX, lambda w: w * 2, "got is about 2 times"),
    "sign": (MATRIX, lambda w: -w, "the sign is flipped"),
    "base": (MATRIX, lambda w: w * math.log(2), "natural logarithm or exponential against base 2"),
    "offset": (MATRIX, lambda w: w + 1, "a constant offset: got is about +1"),
    "shift": (MATRIX, lambda w: w.roll(1, 1), "shifted by 1 along axis 1"),
    "head shift": (HEADS, lambda w: w.roll(-1, 1), "shifted by -1 along axis 1"),
    "transposed": (HEADS, lambda w: w.transpose(0, 1).reshape(w.shape), "axes 0 and 1 are swapped in memory"),
    "backwards": (MATRIX, lambda w: w.flip(1), "axis 1 runs backwards"),
    "interleaved": (MATRIX, halves, "interleaved pairs against half-split"),
    "noise": (MATRIX, noisy, "a matter of precision"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_pattern_names_the_fault(name: str) -> None:
    shape, fault, words = FAULTS[name]
    torch.manual_seed(0)
    want = torch.randn(shape).bfloat16()
    got = fault(want.clone()).contiguous()
    record = built(got, want)
    assert not record.passed and words in record.pattern, record.pattern
    text = diff.describe(toy.problem(), [record], "1 of 5 draws")
    assert words in text and len(text) <= MAX_MESSAGE and "`y`" in text


def built(got: torch.Tensor, want: torch.Tensor) -> diff.OutputDiff:
    found = tolerance.compare(toy.problem(), 0, got, want, want.double())
    return diff.build(toy.problem(), 0, found, diff.Values(got, got, want, want.double()))


def test_got_and_want_are_those_of_the_worst_place() -> None:
    want = torch.randn(5, 7, 64)
    got = want.clone()
    got[3, 2, 11] = 50
    record = built(got, want)
    assert record.worst_index == (3, 2, 11) and record.got == 50 and record.want == pytest.approx(float(want[3, 2, 11]))
    assert record.share_outside == 1 / want.numel()
    assert record.max_abs_error == pytest.approx(50 - float(want[3, 2, 11]))


def test_counts_of_special_values() -> None:
    want = torch.randn(8, 64)
    got = want.clone()
    got[0, :3], got[1, :2] = math.nan, math.inf
    record = built(got, want)
    assert (record.nan_count, record.inf_count, record.max_abs_error) == (3, 2, math.inf)
    assert "3 NaN and 2 infinities" in diff.describe(toy.problem(), [record], "1 of 5 draws")


def test_what_was_never_written_is_not_told_as_nan() -> None:
    want = torch.randn(48, 256).bfloat16()
    record = built(columns_and_factor(want.clone()), want)
    assert (record.nan_count, record.got) == (0, None)
    text = diff.describe(toy.problem(), [record], "1 of 5 draws")
    assert text.endswith(f"{COLUMNS}.") and "NaN" not in text and "inf" not in text
    got = want.clone()
    got.view(torch.int16)[:, 96:128] = -1
    got[0, 0] = math.nan
    assert built(got, want).nan_count == 1


def test_integer_outputs_have_patterns_too() -> None:
    want = torch.arange(1, 401).reshape(20, 20)
    got = want.clone()
    got[15:] = -1
    assert "not written" in built(got, want).pattern
    got[15:] = 0
    assert "all wrong elements are 0; 100 of 400 elements (25 %): the last 5 rows" in built(got, want).pattern


def test_a_passing_output_has_no_pattern() -> None:
    want = torch.randn(4, 64)
    assert built(want.clone(), want).pattern == ""
