"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mkb_env.problems.linear_attention.hyena_fft_conv_block_hyena_small_fp32 import problem

INDEPENDENT = "torch's linear and depthwise conv1d, and the long convolution's sum token by token, float64"
CHANNELS_AT_ONCE = 32
Operand = Callable[[torch.Tensor], torch.Tensor]


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """All tokens of short sequences, 40 tokens of long ones."""
    u, w_in, b_in, short_w, short_b, taps, filter_bias, w_out, b_out = (x.double() for x in inputs)
    length, linear = u.shape[1], torch.nn.functional.linear
    z = torch.nn.functional.conv1d(linear(u, w_in, b_in).mT, short_w[:, None], short_b, padding=2, groups=len(short_w))[
        ..., :length
    ]
    x0, x1, v = z.unflatten(1, (3, -1)).unbind(1)
    p = x1 * v
    for t in range(length) if length <= 64 else torch.linspace(0, length - 1, 40).long().tolist():
        r = (taps[:, : t + 1].flip(-1) * p[..., : t + 1]).sum(-1) + filter_bias * p[..., t]
        torch.testing.assert_close(truth[0][:, t], linear(r * x0[..., t], w_out, b_out), rtol=1e-9, atol=1e-10)


def _product(x: torch.Tensor, weight: torch.Tensor, operand: Operand = lambda x: x, depth: int = 32) -> torch.Tensor:
    """The product with weight^T, summed over slices of ``depth`` channels one after another."""
    parts = range(0, x.shape[-1], depth)
    products = (operand(x[..., at : at + depth]) @ operand(weight[:, at : at + depth]).T for at in parts)
    total = next(products)
    for part in products:
        total += part
    return total


def _directly(p: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Causal convolution by the matrices with taps[i - j] at (i, j), some channels at a time."""
    length, result = p.shape[-1], torch.empty_like(p)
    for at in range(0, p.shape[1], CHANNELS_AT_ONCE):
        some = slice(at, at + CHANNELS_AT_ONCE)
        padded = torch.nn.functional.pad(taps[some].flip(-1), (0, length - 1))
        rows = padded.unfold(1, length, 1).flip(1)  # row i: taps[i], taps[i - 1], ..., taps[0], 0, ...
        result[:, some] = torch.einsum("dij,bdj->bdi", rows, p[:, some])
    return result


def _in_blocks(p: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Blocks of at least 16 taps, each by transforms of its own; the results overlap and are added."""
    length = p.shape[-1]
    block = max(16, -(-length // 4))
    result = torch.zeros_like(p)
    for at in range(0, length, block):
        part = torch.nn.functional.pad(taps[:, at : at + block], (0, length))[:, :length]
        result[..., at:] += problem.long_convolution(p, part)[..., : length - at]
    return result


def _variant(
    u: torch.Tensor,
    w_in: torch.Tensor,
    b_in: torch.Tensor,
    short_w: torch.Tensor,
    short_b: torch.Tensor,
    taps: torch.Tensor,
    filter_bias: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
    convolve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _directly,
    operand: Operand = lambda x: x,
    fault: str = "",
) -> torch.Tensor:
    """Token-first short convolution, sliced projections and another long convolution."""
    z = _product(u, w_in, operand) + b_in
    if fault == "taps":
        short_w = short_w.flip(-1)
    s = short_w[:, 2] * z + short_b
    s[:, 1:] += short_w[:, 1] * z[:, :-1]
    s[:, 2:] += short_w[:, 0] * z[:, :-2]
    x0, x1, v = s.transpose(1, 2).chunk(3, dim=1)
    if fault == "gates":
        x0, x1 = x1, x0
    p = v * x1
    r = convolve(p, taps[:, : u.shape[1]]) + filter_bias[:, None] * (v if fault == "bias" else p)
    return _product((r * x0).transpose(1, 2), w_out, operand) + b_out


def _circular(p: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Transforms of L points, which wrap around."""
    return torch.fft.irfft(torch.fft.rfft(p) * torch.fft.rfft(taps), n=p.shape[-1])


def _without_last(p: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """One tap too few."""
    return problem.long_convolution(p, taps[:, :-1])


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 fraction bits."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


WRONG = {
    "transforms of L points": partial(_variant, convolve=_circular),
    "taps of the short filter in reverse": partial(_variant, fault="taps"),
    "gates swapped": partial(_variant, fault="gates"),
    "the filter's bias on the ungated values": partial(_variant, fault="bias"),
    "the last tap left out": partial(_variant, convolve=_without_last),
    "projections of operands rounded to TF32": partial(_variant, operand=_tf32),
}
SECOND = {
    "direct sums": _variant,
    "four blocks of taps, overlapping": partial(_variant, convolve=_in_blocks),
}
