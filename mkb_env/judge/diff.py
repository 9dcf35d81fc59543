"""What is wrong with an output, in words that lead to the fault in the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from mkb_env.devices.base import POISON_BYTE
from mkb_env.judge import tolerance
from mkb_env.judge.tolerance import Comparison
from mkb_env.judge.verdict import OutputDiff, clip
from mkb_env.problems.contract import Problem

SMALL_ERROR = 0.05
"""Errors of this size, as a ratio of root mean squares over the output, are read as a matter of precision..."""
SMALL_EXCESS = 0.15
"""...if those outside the allowance are no larger than this."""
DENSE = 0.85
"""Share of a region's elements that must be wrong for the region to be named: some are right by luck."""
FACTORS = {
    math.log(2): "ln 2: natural logarithm or exponential against base 2",
    1 / math.log(2): "1/ln 2: natural logarithm or exponential against base 2",
    -1.0: "the sign is flipped",
}


@dataclass(frozen=True)
class Values:
    """One output of one draw."""

    raw: torch.Tensor
    """As the kernels left it."""
    got: torch.Tensor
    """Decoded, as are the next two."""
    reference: torch.Tensor
    anchor: torch.Tensor
    inputs: Sequence[Any] = ()


def build(problem: Problem, position: int, found: Comparison, values: Values) -> OutputDiff:
    """The record of one output's comparison; the pattern is sought only if it failed.

    Elements that were never written are no NaN of the kernel's: they are not counted, and ``got`` is None at such a
    place.
    """
    raw, got = values.raw, values.got
    shape = tuple(got.shape)
    pattern, silent, unwritten = "", 0, False
    if not found.passed:
        outside = tolerance.outside_mask(problem, position, got, values.reference, values.anchor, values.inputs)
        left = _unwritten(raw, outside)
        pattern = guess(got, values.reference, outside, left, found)
        silent, unwritten = int(left.sum()) if found.nans else 0, bool(left.flatten()[found.worst])
    return OutputDiff(
        name=f"output[{position}]",
        shape=shape,
        dtype=str(raw.dtype).removeprefix("torch."),
        passed=found.passed,
        max_abs_error=found.error,
        allowance=found.allowance,
        worst_index=unravel(found.worst, shape) if got.numel() else (),
        got=None if unwritten or not got.numel() else found.got,
        want=found.want if got.numel() else None,
        share_outside=found.outside / max(1, got.numel()),
        nan_count=found.nans - silent,
        inf_count=found.infs,
        pattern=pattern,
    )


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Index of the ``flat``-th element in row-major order."""
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def guess(
    got: torch.Tensor, want: torch.Tensor, outside: torch.Tensor, unwritten: torch.Tensor, found: Comparison
) -> str:
    """A phrase for how ``got`` differs from ``want``: what is wrong with the values, then where they are wrong."""
    if not got.dim():
        got, want, outside, unwritten = (tensor.reshape(1) for tensor in (got, want, outside, unwritten))
    if bool(unwritten.all()):
        return "nothing was written: the whole output still holds the fill pattern"
    count = int(unwritten.sum())
    if count > 0.9 * int(outside.sum()):
        return f"not written (the fill pattern is still there): {_where(unwritten)}"
    rest = outside & ~unwritten
    values = _values(got, want, rest, found)
    where = _where(rest)
    if count and int(rest.sum()) >= DENSE * (rest.numel() - count):
        where = "nearly everywhere else"
    place = f"{values}; {where}" if values else where
    if not count:
        return place
    return f"{count} of the wrong elements were never written: {_place(unwritten, count)}. The others: {place}"


# What is wrong with the values


def _values(got: torch.Tensor, want: torch.Tensor, outside: torch.Tensor, found: Comparison) -> str:
    if not want.dtype.is_floating_point:
        return "all wrong elements are 0" if not bool(tolerance.integers(got)[outside.flatten()].any()) else ""
    mine, theirs = got.double(), want.double()
    bad, wanted = mine[outside], theirs[outside]
    if bool(bad.isnan().all()):
        return "all wrong elements are NaN"
    if bool((bad == 0).all()):
        return "all wrong elements are 0"
    clean = bad.isfinite() & wanted.isfinite()
    if not bool(clean.all()):
        kinds = ("NaN", bad.isnan()), ("infinite", bad.isinf())
        counts = [f"{int(flags.sum())} of the wrong elements are {name}" for name, flags in kinds if bool(flags.any())]
        return ", ".join(counts) or "the reference has NaN or infinities there"
    if len(bad) >= 8:
        for seek in (_factor, _offset):
            if phrase := seek(bad, wanted):
                return phrase
    if len(bad) >= 8 and (phrase := _moved(mine, theirs, outside)):
        return phrase
    if _ratio(bad, wanted) <= SMALL_EXCESS and _ratio(mine, theirs) <= SMALL_ERROR:
        most = f" (at most {found.share:.1f} times it)" if math.isfinite(found.share) else ""
        return f"close but not within tolerance{most}: a matter of precision"
    return ""


def _ratio(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Root mean square of the error over that of the wanted values, where both are finite."""
    finite = mine.isfinite() & theirs.isfinite()
    wanted = float(theirs[finite].square().sum())
    return math.sqrt(float((mine - theirs)[finite].square().sum()) / wanted) if wanted else math.inf


def _factor(bad: torch.Tensor, wanted: torch.Tensor) -> str:
    energy = float(wanted.square().sum())
    if not energy:
        return ""
    factor = float((bad * wanted).sum()) / energy
    rest = float((bad - factor * wanted).square().sum()) / max(float(bad.square().sum()), 1e-300)
    if rest > 1e-3 or abs(factor - 1) < 0.005:
        return ""
    known = next((text for value, text in FACTORS.items() if abs(factor / value - 1) < 0.003), "")
    return f"a constant factor: got is about {factor:.4g} times what was wanted" + (f" ({known})" if known else "")


def _offset(bad: torch.Tensor, wanted: torch.Tensor) -> str:
    difference = bad - wanted
    mean = float(difference.mean())
    if abs(mean) < 1e-12 or float(difference.std()) > 0.02 * abs(mean) or float(wanted.std()) < 2 * abs(mean) * 0.02:
        return ""
    return f"a constant offset: got is about {mean:+.4g} from what was wanted"


def _moved(mine: torch.Tensor, theirs: torch.Tensor, outside: torch.Tensor) -> str:
    """Right values in the wrong places."""
    dims = [axis for axis, size in enumerate(theirs.shape) if size > 1]
    for axis in dims:
        for step in (1, -1, theirs.shape[axis] // 2):
            if step and _alike(mine, theirs.roll(step, axis), outside):
                return f"right values in wrong places: shifted by {step} along axis {axis}"
        if _alike(mine, theirs.flip(axis), outside):
            return f"right values in wrong places: axis {axis} runs backwards"
    for first, second in ((a, b) for a in dims for b in dims if a < b):
        if _alike(mine, theirs.transpose(first, second).reshape(theirs.shape), outside):
            return f"right values in wrong places: axes {first} and {second} are swapped in memory"
    size = theirs.shape[-1]
    if size % 2 == 0 and size > 2:
        halves = theirs.unflatten(-1, (2, size // 2)).transpose(-1, -2).reshape(theirs.shape)
        pairs = theirs.unflatten(-1, (size // 2, 2)).transpose(-1, -2).reshape(theirs.shape)
        if _alike(mine, halves, outside) or _alike(mine, pairs, outside):
            return "right values in wrong places: interleaved pairs against half-split along the last axis"
    return ""


def _alike(mine: torch.Tensor, moved: torch.Tensor, outside: torch.Tensor) -> bool:
    """Whether nearly all wrong elements hold the moved values (the seam of a shift may differ)."""
    left, right = mine[outside], moved[outside]
    scale = right.abs().mean()
    return bool(((left - right).abs() <= 0.02 * (right.abs() + scale)).double().mean() > 0.95)


# Where they are wrong


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Elements that still hold the fill pattern in every byte."""
    size = tensor.element_size()
    flat = tensor.contiguous().flatten().view(torch.uint8).view(-1, size)
    return (flat == POISON_BYTE).all(1).view(tensor.shape)


def _unwritten(got: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    """Wrong elements that nothing wrote; of integers only where nearly all are, as -1 may be an answer too."""
    left = _poisoned(got) & outside
    return left if got.is_floating_point() or int(left.sum()) > 0.9 * int(outside.sum()) else torch.zeros_like(left)


def _where(outside: torch.Tensor) -> str:
    """A phrase for the set of wrong elements: how many they are, and where."""
    count, total = int(outside.sum()), outside.numel()
    if count == total:
        return "every element"
    return f"{count} of {total} elements ({100 * count / total:.3g} %): {_place(outside, count)}"


def _place(outside: torch.Tensor, count: int) -> str:
    """The plainest description that covers the ``count`` wrong elements."""
    if count == 1:
        return "a single element"
    return next(_descriptions(outside, count), "spread over the whole output")


def _descriptions(outside: torch.Tensor, count: int) -> Iterator[str]:
    touched = _touched(outside)
    partial = [axis for axis, flags in enumerate(touched) if not bool(flags.all())]
    if 2 * count > outside.numel():
        right = _touched(~outside)
        if phrase := _box(right, outside.numel() - count):
            yield f"everything but {phrase}"
    if phrase := _box(touched, count):
        yield phrase
    if count >= DENSE * outside.numel():
        yield "nearly everywhere"
    places = outside.flatten().nonzero().flatten()
    first, last = int(places[0]), int(places[-1])
    if count >= DENSE * (last - first + 1):
        begin, end = (list(unravel(place, outside.shape)) for place in (first, last))
        yield (
            f"the tail, from {begin} on" if last == outside.numel() - 1 else f"one run in memory, from {begin} to {end}"
        )
    for axis in partial:
        if int(touched[axis].sum()) <= max(1, len(touched[axis]) // 4):
            yield f"only in {_indices(axis, touched[axis], len(touched))}, and not all of it"


def _box(touched: Sequence[torch.Tensor], count: int) -> str:
    """The ``count`` elements within these indices per axis, if they are nearly all combinations of them."""
    partial = [axis for axis, flags in enumerate(touched) if not bool(flags.all())]
    volume = math.prod(int(flags.sum()) for flags in touched)
    if not partial or count < DENSE * volume:
        return ""
    return " and ".join(_indices(axis, touched[axis], len(touched)) for axis in partial)


def _touched(outside: torch.Tensor) -> list[torch.Tensor]:
    """Per axis, which of its indices hold a wrong element; bool on the host."""
    return [outside.movedim(axis, 0).reshape(size, -1).any(1).cpu() for axis, size in enumerate(outside.shape)]


def _indices(axis: int, flags: torch.Tensor, dims: int) -> str:
    """The indices set in ``flags``, as one phrase."""
    places = flags.nonzero().flatten().tolist()
    size = len(flags)
    name = ("column" if axis == dims - 1 else "row" if axis == 0 else "index") if dims == 2 else "index"
    named = f"{name}s" if name != "index" else "indices"
    where = f" of axis {axis} ({size})"
    if len(places) == 1:
        return f"{name} {places[0]}{where}"
    first, last = places[0], places[-1]
    if last - first + 1 == len(places):
        edge = "the last" if last == size - 1 else "the first" if first == 0 else ""
        run = f"{named} {first} to {last}"
        block = next((b for b in (256, 128, 64, 32, 16, 8) if first % b == 0 and len(places) % b == 0), 0)
        note = f", a multiple of {block} aligned to it" if block and not edge else ""
        return f"{edge + f' {len(places)} ' if edge else ''}{named if edge else run}{where}{note}"
    step = places[1] - places[0]
    if step > 1 and all(b - a == step for a, b in pairwise(places)) and len(places) > 2:
        return f"every {_ordinal(step)} {name}{where}, from {first} to {last}"
    shown = ", ".join(map(str, places[:8])) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
    return f"{named} {shown}{where}"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def describe(problem: Problem, diffs: Sequence[OutputDiff], checked: str) -> str:
    """One paragraph for an agent, at most ``MAX_MESSAGE`` characters; ``checked`` says which draws failed."""
    parts = [f"wrong results in {checked}."]
    for position, diff in enumerate(diffs):
        title = f"{diff.name} (`{problem.outputs[position]}`, {'x'.join(map(str, diff.shape))} {diff.dtype})"
        if diff.passed:
            parts.append(f"{title} is right.")
            continue
        parts.append(f"{title}: {diff.pattern}.")
        if diff.got is not None and diff.want is not None:
            parts.append(
                f"Worst at {list(diff.worst_index)}: got {diff.got:.6g}, want {diff.want:.6g}, "
                f"error {diff.max_abs_error:.6g} where {diff.allowance:.6g} is allowed."
            )
        if diff.nan_count or diff.inf_count:
            parts.append(f"It holds {diff.nan_count} NaN and {diff.inf_count} infinities.")
    return clip(" ".join(parts))
