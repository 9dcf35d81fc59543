"""What several attention problems have in common: pure functions of tensors."""

from __future__ import annotations

import torch


def half_turn(x: torch.Tensor) -> torch.Tensor:
    """The quarter turn of every pair (i, i + D/2) of the last axis: (-second half, first half)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary_frequencies(channels: int, theta: float, device: torch.device) -> torch.Tensor:
    """``theta``^(-2i / channels) for i < channels / 2, float64."""
    return theta ** -(torch.arange(0, channels, 2, device=device, dtype=torch.float64) / channels)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which stays with size 1."""
    return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """A float32 tensor rounded to the 10 fraction bits of TF32, as operands of tensor cores are."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def allowance_by_tensor(anchor: torch.Tensor, relative: float) -> torch.Tensor:
    """Allowed absolute error: ``relative`` (|x| + rms of x over the whole tensor)."""
    return relative * (anchor.abs() + anchor.square().mean().sqrt())
