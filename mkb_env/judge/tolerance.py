"""How far an output may lie from the truth.

With ``e`` the reference's own error |reference - anchor| and ``m`` = |anchor|, an output of dtype ``d`` may err by

    globally   3 max(max e, eps(d) max m)                over the whole output
    per row    3 max(max e, max(eps(d), r) max m)        over each row

and every element must satisfy both. The anchor is the fp64 truth, so the candidate is measured against the truth and
not against the reference's rounding. The global rule alone is blind to rows much smaller than the largest.

A *row* is the smallest group of trailing axes with at least ``MIN_ROW`` elements: the last axis, for most outputs (one
token, one head), whatever the number of leading axes. Shorter rows would reject correct kernels: a handful of elements
can be small together by cancellation, or be hit exactly by the reference, and then say nothing about the scale at
which the kernel had to round. Outputs that are a single row have the global rule only.

``r`` is the largest relative error max e / max m of the reference over the rows of at least median size. Without it a
row's allowance would follow the luck of the reference in that row, and among 10^5 rows of fp32 results one in which a
correct kernel errs three times as much is certain. It is taken from the larger rows, so a row in which the reference
itself cancels away does not loosen the rule for all others. For outputs rounded once to 16 bits, r < eps and nothing
changes. A row whose anchor is zero must be zero (if the reference's is).

The largest error says little about a small one that all elements share: without its reduction, a norm over 4096 normal
numbers is wrong by 1 % throughout, and passes the rules above in most rows. Outputs of 16 bits or fewer therefore also
have a limit on a row's root mean square error, 3 max(rms e, max(eps(d)/2, r') rms m) with r' as r. A correctly rounded
result has at most eps/2 in every element, so it always passes; bf16 probabilities or bf16 chunked products (0.6 % and
less) do too. In a row over this limit every element over it counts as outside; elements outside by the other rules are
not part of the mean. Results in fp32 have no such limit: their rounding is negligible, and the order of a sum alone can
move a whole row by more than the reference errs.

NaN and Inf must be where the reference has them, Inf with its sign; integers and booleans are exact. A problem's
``allowance`` replaces the rule (``None`` from it: the rule stays); it may name a second, tighter bound that all but a
share of the elements keep. Outputs of codes are compared by the numbers they stand for (the problem's ``decode``).

References: rounding of a result costs at most eps/2 of it (Goldberg 1991, "What every computer scientist should know
about floating-point arithmetic"), so eps max m x 3 admits six roundings of the largest element of the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Problem

FACTOR = 3.0
COARSE = 2.0**-11
"""From this epsilon on (fp16 and coarser) rounding dominates an output's error, and the root-mean-square rule holds."""
MIN_ROW = 32
CHUNK = 1 << 24
"""Elements handled at once: bounds the float64 temporaries at 128 MiB each."""
_EXACT_BYTES = tuple(getattr(torch, n) for n in ("float4_e2m1fn_x2",) if hasattr(torch, n))


@dataclass(frozen=True)
class Comparison:
    """One output of one draw against the truth. The worst element is that with the largest share of its allowance."""

    passed: bool
    error: float
    """|got - anchor| of the worst element; infinite where a NaN or Inf is out of place."""
    allowance: float
    worst: int
    """Flat index of the worst element."""
    got: float
    want: float
    outside: int
    """Elements outside their allowance."""
    nans: int
    """NaN in the candidate's output, wherever the reference's are."""
    infs: int
    share: float
    """Error of the worst element over its allowance (0 for 0 of 0)."""
    reference_share: float
    """The same of the reference itself, by the most: how much of the allowance is its own error."""
    relative: float
    """Largest row error of the reference over the row's largest |anchor|."""
    special: bool
    """Whether the reference holds NaN or Inf."""


def row_length(shape: torch.Size | tuple[int, ...]) -> int:
    """Elements of one row: the smallest product of trailing sizes that reaches ``MIN_ROW``, else all elements."""
    length = 1
    for size in reversed(shape):
        length *= size
        if length >= MIN_ROW:
            break
    return length


def epsilon(dtype: torch.dtype) -> float:
    """Distance from 1 to the next number of ``dtype``."""
    return float(torch.finfo(dtype).eps)


def is_exact(dtype: torch.dtype) -> bool:
    """Whether outputs of ``dtype`` are compared bit by bit (integers, booleans, packed 4-bit codes)."""
    return not dtype.is_floating_point or dtype in _EXACT_BYTES


def compare(
    problem: Problem,
    position: int,
    got: torch.Tensor,
    reference: torch.Tensor,
    anchor: torch.Tensor,
    inputs: Sequence[Any] = (),
) -> Comparison:
    """Compare output ``position``, decoded: tensors of one shape; ``got`` and ``reference`` of one dtype.

    ``anchor`` is float64; ``inputs`` are the draw's, for the problem's own allowance. Waits for the device.
    """
    if not got.numel():
        return Comparison(True, 0.0, 0.0, 0, math.nan, math.nan, 0, 0, 0, 0.0, 0.0, 0.0, False)
    own = own_allowance(problem, position, inputs, reference, anchor)
    if own is None and is_exact(reference.dtype):
        return _compare_exact(got, reference)
    return _Rows(got, reference, anchor, own).judge()


def outside_mask(
    problem: Problem,
    position: int,
    got: torch.Tensor,
    reference: torch.Tensor,
    anchor: torch.Tensor,
    inputs: Sequence[Any] = (),
) -> torch.Tensor:
    """Where an output lies outside its allowance, by the arguments of :func:`compare`: bool, of the output's shape."""
    own = own_allowance(problem, position, inputs, reference, anchor)
    if own is None and is_exact(reference.dtype):
        return (integers(got) != integers(reference)).view(got.shape)
    return _Rows(got, reference, anchor, own).outside().view(got.shape)


def own_allowance(
    problem: Problem, position: int, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor
) -> Allowance | None:
    """The problem's own allowance, float64, of the output's shape; None where the general rule counts."""
    if problem.allowance is None:
        return None
    own = problem.allowance(problem.outputs[position], inputs, reference, anchor)
    if own is None:
        return None

    def finite(bound: Any) -> torch.Tensor:
        # A NaN would admit everything: rows without a finite truth have no allowance.
        bound = torch.as_tensor(bound, dtype=torch.float64, device=reference.device).nan_to_num(nan=0.0)
        return bound.expand(reference.shape)

    if isinstance(own, Allowance):
        return Allowance(finite(own.limit), finite(own.usual), own.share)
    limit = finite(own)
    return Allowance(limit, limit, 1.0)


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Integer-like values as int64 (uint64 and packed codes by their bits), flat."""
    tensor = tensor.contiguous().flatten()
    if tensor.dtype is torch.uint64:
        return tensor.view(torch.int64)
    return (tensor.view(torch.uint8) if tensor.dtype in _EXACT_BYTES else tensor).to(torch.int64)


def _compare_exact(got: torch.Tensor, reference: torch.Tensor) -> Comparison:
    left, right = integers(got), integers(reference)
    error = (left.double() - right.double()).abs_().masked_fill_(left == right, 0.0)
    # Neighbours beyond 2^53 have the same double; they differ all the same.
    error = torch.where((left != right) & (error == 0), 1.0, error)
    worst = error.argmax()
    numbers = torch.stack([error[worst], worst.double(), left[worst].double(), right[worst].double()])
    outside = int((left != right).sum())
    value, place, mine, theirs = numbers.tolist()
    share = math.inf if outside else 0.0
    return Comparison(not outside, value, 0.0, int(place), mine, theirs, outside, 0, 0, share, 0.0, 0.0, False)


class _Rows:
    """One output as [rows, row length], handled in chunks of whole rows; ``own``: the problem's allowance, or None.

    Two passes over the output, since a row's allowance depends on all rows: first the reference's own errors, then the
    candidate's. On a GPU both are bound by memory, so nothing is computed twice.
    """

    def __init__(self, got: torch.Tensor, reference: torch.Tensor, anchor: torch.Tensor, own: Allowance | None) -> None:
        self.dtype = reference.dtype
        self.length = row_length(got.shape)
        self.count = got.numel() // self.length
        self.got, self.reference, self.anchor = (t.reshape(self.count, self.length) for t in (got, reference, anchor))
        self.plain = bool(reference.isfinite().all() & anchor.isfinite().all())
        """No NaN or Inf in the truth, as nearly always: the masks for them are left out."""
        self.by_row = own is None
        self.mean_square = own is None and self.length >= MIN_ROW and epsilon(self.dtype) >= COARSE
        self._measure_reference()
        self.allowed = self._allowance() if own is None else self._own_allowance(own)

    def chunks(self) -> Iterator[slice]:
        step = max(1, CHUNK // self.length)
        return (slice(begin, min(begin + step, self.count)) for begin in range(0, self.count, step))

    def _finite(self, part: slice) -> torch.Tensor | None:
        """Where reference and anchor are both finite; None for everywhere."""
        return None if self.plain else self.reference[part].isfinite() & self.anchor[part].isfinite()

    def _measure_reference(self) -> None:
        """Per row, over finite elements: largest and root mean square |reference - anchor| and |anchor|, float64."""
        self.errors, self.scales, self.rms_errors, self.rms_scales = (
            torch.zeros(self.count, dtype=torch.float64, device=self.got.device) for _ in range(4)
        )
        for part in self.chunks():
            anchor, finite = self.anchor[part].double(), self._finite(part)
            error = (self.reference[part].double() - anchor).abs_()
            if finite is not None:
                error, anchor = error.masked_fill_(~finite, 0.0), anchor.masked_fill(~finite, 0.0)
            self.errors[part] = error.amax(1)
            # abs: -0.0 for a row of zeros would turn the share of an error in it to -inf
            self.scales[part] = torch.maximum(anchor.amax(1), -anchor.amin(1)).abs_()
            if self.mean_square:
                self.rms_errors[part] = _rms(error)
                self.rms_scales[part] = _rms(anchor)

    def _allowance(self) -> torch.Tensor:
        """Allowed error per row, float64 [rows, 1]."""
        overall = FACTOR * torch.maximum(self.errors.max(), epsilon(self.dtype) * self.scales.max())
        self.rms_limit = _row_limit(self.rms_errors, self.rms_scales, epsilon(self.dtype) / 2)
        return torch.minimum(overall, _row_limit(self.errors, self.scales, epsilon(self.dtype))).unsqueeze(1)

    def _own_allowance(self, own: Allowance) -> torch.Tensor:
        """The problem's bound of every element; the tighter one for all, if too many exceed it."""
        limit, usual = own.limit.reshape(self.count, self.length), own.usual.reshape(self.count, self.length)
        if own.share >= 1.0:
            return limit
        beyond = sum(int((self._error(part) > usual[part]).sum()) for part in self.chunks())
        return torch.minimum(limit, usual) if beyond > own.share * self.got.numel() else limit

    def _error(self, part: slice) -> torch.Tensor:
        """|got - anchor|, float64; infinite where a NaN or Inf is out of place, 0 where it is in place."""
        got, finite = self.got[part].double(), self._finite(part)
        error = (got - self.anchor[part]).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
        if finite is None:
            return error
        reference = self.reference[part].double()
        same = (got == reference) | (got.isnan() & reference.isnan())
        return torch.where(finite, error, torch.where(same, 0.0, math.inf))

    def _judged(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Error and allowance of some rows; in rows over the root-mean-square limit that limit is the allowance."""
        error, allowed = self._error(part), self.allowed[part]
        if self.mean_square:
            # What is outside already needs no second finding, and would spread to its row.
            inside = torch.where(error > allowed, 0.0, error)
            limit = self.rms_limit[part].unsqueeze(1)
            over = _rms(inside).unsqueeze(1) > limit
            allowed = torch.where(over, torch.minimum(allowed, limit), allowed)
        return error, allowed

    def outside(self) -> torch.Tensor:
        judged = (self._judged(part) for part in self.chunks())
        return torch.cat([error > allowed for error, allowed in judged])

    def judge(self) -> Comparison:
        relative = torch.where(self.scales > 0, self.errors / self.scales, 0.0).max()
        table = torch.stack([self._judge_chunk(part) for part in self.chunks()]).tolist()
        share, error, allowed, place, got, want = max(table, key=lambda row: row[0])[:6]
        outside, nans, infs, special = (int(sum(row[column] for row in table)) for column in range(6, 10))
        return Comparison(
            passed=not outside,
            error=error,
            allowance=allowed,
            worst=int(place),
            got=got,
            want=want,
            outside=outside,
            nans=nans,
            infs=infs,
            share=share,
            reference_share=max(row[10] for row in table),
            relative=float(relative),
            special=special > 0,
        )

    def _judge_chunk(self, part: slice) -> torch.Tensor:
        """The figures of :class:`Comparison` for some rows, float64 [11], without waiting for the device."""
        error, allowed = self._judged(part)
        # 0 of 0 is a share of nothing, anything else of 0 all there is.
        shares = (error / allowed).nan_to_num_(nan=0.0, posinf=math.inf)
        worst = shares.argmax().reshape(1)
        got, reference = self.got[part], self.reference[part]
        none = torch.zeros((), dtype=torch.float64, device=got.device)
        numbers = (
            shares.flatten().index_select(0, worst),
            error.flatten().index_select(0, worst),
            allowed.expand_as(error).reshape(-1).index_select(0, worst)
            if not self.by_row
            else allowed.flatten().index_select(0, worst // self.length),
            worst + part.start * self.length,
            got.reshape(-1).index_select(0, worst),
            reference.reshape(-1).index_select(0, worst),
            (error > allowed).sum(),
            got.isnan().sum(),
            got.isinf().sum(),
            none if self.plain else (~reference.isfinite()).sum(),
            self._reference_share(part, allowed),
        )
        return torch.stack([number.double().reshape(()) for number in numbers])

    def _reference_share(self, part: slice, allowed: torch.Tensor) -> torch.Tensor:
        """How much of the allowance the reference itself uses, at most."""
        if self.by_row:
            own = self.errors[part].unsqueeze(1) / allowed
        else:
            own = (self.reference[part].double() - self.anchor[part]).abs_().div_(allowed)
            if (finite := self._finite(part)) is not None:
                own = own.masked_fill_(~finite, 0.0)
        return own.nan_to_num_(nan=0.0, posinf=math.inf).max()


def _rms(values: torch.Tensor) -> torch.Tensor:
    """Root mean square of each row."""
    return torch.linalg.vector_norm(values, dim=1) / math.sqrt(values.shape[1])


def _row_limit(errors: torch.Tensor, scales: torch.Tensor, floor: float) -> torch.Tensor:
    """3 max(e, max(floor, r) m) per row, r the largest e / m of the rows of at least median m; float64 [rows]."""
    # Sorting: on a GPU the median of one long row is found by a single block.
    median = scales.sort().values[(len(scales) - 1) // 2]
    ordinary = (scales >= median) & (scales > 0)
    typical = torch.where(ordinary, errors / scales, 0.0).max().clamp_min(floor)
    return FACTOR * torch.maximum(errors, typical * scales)


@dataclass(frozen=True)
class QuickRule:
    """The rule for a timed draw, from the reference alone (its anchor would cost more than the draw).

    Since |got - reference| <= |got - anchor| + |reference - anchor|, a candidate within the full rule passes this one;
    it is wider than the full rule by the reference's own share of the allowance, at most a third.
    """

    relative: float
    """The reference's error, relative to the largest element of a row: from the draws with an anchor."""
    reference_share: float
    special: bool

    @staticmethod
    def learn(comparisons: list[Comparison], dtype: torch.dtype) -> QuickRule:
        """From one output's comparisons in the correctness draws."""
        floor = 0.0 if is_exact(dtype) else epsilon(dtype)
        return QuickRule(
            max([floor, *(c.relative for c in comparisons)]),
            max(c.reference_share for c in comparisons),
            any(c.special for c in comparisons),
        )

    def holds(
        self,
        problem: Problem,
        position: int,
        got: torch.Tensor,
        reference: torch.Tensor,
        inputs: Sequence[Any] = (),
    ) -> torch.Tensor:
        """Whether ``got`` passes, both decoded: a bool scalar on the device (no host wait)."""
        if not got.numel():
            return torch.ones((), dtype=torch.bool, device=got.device)
        own = own_allowance(problem, position, inputs, reference, reference.double()) if problem.allowance else None
        if own is None and is_exact(reference.dtype):
            return (integers(got) == integers(reference)).all()
        length = row_length(got.shape)
        wide = torch.promote_types(reference.dtype, torch.float32)
        values, wanted = got.reshape(-1, length).to(wide), reference.reshape(-1, length).to(wide)
        error, scale = (values - wanted).abs_(), wanted
        if self.special:
            same = (values == wanted) | (values.isnan() & wanted.isnan())
            error = torch.where(same, 0.0, error).nan_to_num_(nan=math.inf)
            scale = torch.where(wanted.isfinite(), wanted, 0.0)
        if own is not None:
            # 1 %: the problem's rule saw the reference in place of the anchor.
            inside = (error <= own.limit.reshape(-1, length) * (1.01 * (1 + self.reference_share))).all()
            beyond = (error > own.usual.reshape(-1, length)).double().mean()
            return inside & (beyond <= own.share)
        limit = scale.abs().amax(1) * (1.01 * (FACTOR + 1) * self.relative)
        return (error.amax(1) <= limit).all()
