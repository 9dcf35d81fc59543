"""What several cache problems share: slot maps, rotary tables and rotations, rows of caches, comparison by bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Allowance
from mkb_env.problems.drawing import integers, permutation

NEGATIVE_ZERO = -1e-300
"""What stands for -0 where the sign of a zero counts."""
ROUNDING = 1.6e-2
"""Four bfloat16 roundings of half a unit each (2^-8), and what they cost beyond the first order."""


# -- inputs ------------------------------------------------------------------------------------------------------------


def slot_mapping(
    generator: torch.Generator, tokens: int, slots: int, pads: int = 0, tail_pads: int = 0
) -> torch.Tensor:
    """Distinct slots in random order, int64; -1 at ``pads`` random tokens and at the last 1 to ``tail_pads``."""
    mapping = permutation(generator, slots, torch.int64)[:tokens].clone()
    mapping[permutation(generator, tokens, torch.int64)[:pads]] = -1
    if tail_pads:
        kept = tokens - integers(generator, 1, low=1, high=tail_pads + 1)
        mapping.masked_fill_(torch.arange(tokens, device=generator.device) >= kept, -1)
    return mapping


def rotary_table(positions: int, rotary: int, base: float, device: torch.device) -> torch.Tensor:
    """Row p = [cos(p f_j) | sin(p f_j)], f_j = base^(-2j / rotary), in float32, rounded to bfloat16."""
    exponents = torch.arange(0, rotary, 2, dtype=torch.float32, device=device) / rotary
    angles = torch.arange(positions, dtype=torch.float32, device=device).unsqueeze(1) * base**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()


def scramble(generator: torch.Generator, cache: torch.Tensor, rows: int) -> torch.Tensor:
    """``cache`` (of 16-bit floats), with arbitrary bits, NaN among them, in ``rows`` random rows of its last axis."""
    bits = cache.view(torch.int16).view(-1, cache.shape[-1])
    chosen = permutation(generator, len(bits), torch.int64)[:rows]
    bits[chosen] = integers(generator, rows, cache.shape[-1], low=-(2**15), high=2**15, dtype=torch.int16)
    return cache


# -- operations --------------------------------------------------------------------------------------------------------


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[j], x[j + n / 2]) of the last axis, n long; every operation rounds to the dtype of ``x``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotate_first(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate as many channels of ``x`` as the table's rows [..., cos | sin] have entries; the others stay."""
    rotary = table.shape[-1]
    return torch.cat((rotate(x[..., :rotary], *table.chunk(2, dim=-1)), x[..., rotary:]), dim=-1)


def insert(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of ``cache`` [pages, page size, ...] with rows[t] at slot slots[t], where that is not negative."""
    result = cache.clone()
    kept = slots >= 0
    result.view(-1, *cache.shape[2:])[slots[kept]] = rows[kept]
    return result


def touched(slots: torch.Tensor, count: int) -> torch.Tensor:
    """Which of ``count`` slots are listed; bool [count], without waiting for the device."""
    mask = torch.zeros(count + 1, dtype=torch.bool, device=slots.device)
    mask.index_fill_(0, torch.where(slots < 0, count, slots), True)
    return mask[:count]


def paged_rows(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """The rows of all requests' tokens, request by request, from ``cache`` [pages, page size, row]."""
    lengths = seq_lens.long()
    requests = torch.repeat_interleave(torch.arange(len(lengths), device=cache.device), lengths)
    begins = (lengths.cumsum(0) - lengths)[requests]
    places = torch.arange(len(requests), device=cache.device) - begins
    size = cache.shape[1]
    return cache[block_table[requests, places // size].long(), places % size]


# -- comparison --------------------------------------------------------------------------------------------------------


def with_signed_zeros(values: torch.Tensor) -> torch.Tensor:
    """``values`` as float64, with ``NEGATIVE_ZERO`` in place of -0, so that the sign of a zero counts."""
    number = values.double()
    return torch.where((number == 0) & number.signbit(), NEGATIVE_ZERO, number)


def bitwise(values: torch.Tensor) -> torch.Tensor:
    """float64 numbers that are equal exactly where the bits of 16- or 32-bit floats are; float64 is such already.

    Numbers stand for themselves, -0 is ``NEGATIVE_ZERO``, a NaN becomes a number beyond the range of 32 bits.
    """
    number = with_signed_zeros(values)
    if values.dtype is torch.float64:
        return number
    bits = values.contiguous().view(torch.int16 if values.itemsize == 2 else torch.int32)
    return torch.where(values.isnan(), bits.double() * 2.0**200, number)


def widened(inputs: Sequence[Any], *caches: int) -> list[Any]:
    """Inputs in float64; those at the positions ``caches`` as numbers that stand for their bits."""
    return [
        bitwise(value)
        if position in caches
        else value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for position, value in enumerate(inputs)
    ]


def cache_bits(name: str, outputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """A problem's ``decode``: caches are compared by their bits, all else as it is."""
    return bitwise(outputs[name]) if name.endswith("cache") else None


def rotated_magnitude(truth: torch.Tensor, begin: int, rotary: int) -> torch.Tensor:
    """What roundings scale with: lengths of rotated pairs in truth[..., begin : begin + rotary], |truth| elsewhere."""
    pairs = truth[..., begin : begin + rotary].unflatten(-1, (2, -1))
    lengths = torch.linalg.vector_norm(pairs, dim=-2)
    magnitude = truth.abs()
    magnitude[..., begin : begin + rotary] = torch.cat((lengths, lengths), dim=-1)
    return magnitude


def rounded_rotation(anchor: torch.Tensor, magnitude: torch.Tensor, part: float = 1.0) -> Allowance:
    """Errors up to ``ROUNDING`` of the rotated pair's length; beyond 1.6e-2 (1 + |x|) for 1e-4 of the elements only.

    With u = 2^-8 per rounding, a pair (a, b) that carries two roundings and is multiplied by (c, s), products and
    result rounded, is off by at most 3u (|ac| + |bs|) + u |result| <= 4u |(a, b)|. ``part`` is the share of the
    output's elements that are computed. Three elements may always lie beyond the second bound: in a small output 1e-4
    is less than one, and luck decides.
    """
    share = max(1e-4 * part, 3 / anchor.numel())
    return Allowance(ROUNDING * magnitude, ROUNDING * (1.0 + anchor.abs()), share)


# -- checks by other means ---------------------------------------------------------------------------------------------


def rotate_as_complex(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate float64 ``x`` [..., n], halves as real and imaginary parts, by a table's rows [..., cos | sin]."""
    number, factor = (torch.complex(*half.contiguous().chunk(2, dim=-1)) for half in (x, table))
    product = number * factor
    return torch.cat((product.real, product.imag), dim=-1)


def finite_e4m3_values(device: torch.device) -> torch.Tensor:
    """What the codes 0x00 to 0x7E stand for, by the format's definition: exponent bias 7, three mantissa bits."""
    codes = torch.arange(0x7F, dtype=torch.float64, device=device)
    exponents, mantissas = (codes / 8).floor(), codes % 8
    normal = 2.0 ** (exponents - 7) * (1 + mantissas / 8)
    return torch.where(exponents == 0, 2.0**-6 * mantissas / 8, normal)


def with_inputs(
    function: Callable[..., Any], names: Sequence[str], **changes: Callable[..., Any]
) -> Callable[..., Any]:
    """``function`` on changed inputs: each change is a function of all inputs by name."""

    def changed(*inputs: Any) -> Any:
        given = dict(zip(names, inputs, strict=True))
        return function(*(given | {name: change(given) for name, change in changes.items()}).values())

    return changed


def sample(count: int, most: int) -> list[int]:
    """Up to ``most`` of the numbers below ``count``, evenly spread, first and last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def assert_kept(after: torch.Tensor, before: torch.Tensor, written: Sequence[int]) -> None:
    """Slots (axis 0) outside ``written`` are the same in the truth ``after`` as in the input ``before``."""
    others = torch.ones(len(before), dtype=torch.bool)
    others[torch.tensor(sorted(set(written)), dtype=torch.long)] = False
    others = others.to(before.device)
    got, want = after[others], before[others]
    nan = torch.zeros_like(want, dtype=torch.bool)
    if want.is_floating_point():
        nan, want = want.isnan(), with_signed_zeros(want)
    assert torch.equal(got[~nan], want[~nan]), "a slot that no token addresses changed"
    assert bool((got[nan].abs() > 1e40).all()), "a NaN in a slot that no token addresses is gone"
