"""Operations and rules that several MLP and norm problems, or their checks, share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def llama_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis with two roundings to ``x``'s dtype: of the normalised row, and of its product with
    ``weight``. The statistics are in float32, or float64 for float64 inputs.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def fp32_gemm_allowance(
    name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor
) -> torch.Tensor:
    """Allowed absolute error of matrix products in float32: 5e-3 of the root mean square of each row (last axis).

    One or two products with operands rounded to TF32 (nearest) err by up to 2.4e-3 of it at inner sizes from 48 to
    12288; operands rounded to bfloat16 err by 1.1e-2 and more.
    """
    return 5e-3 * anchor.square().mean(dim=-1, keepdim=True).sqrt()


def nearest_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to TF32's 10 fraction bits, ties away from zero, as tensor-core kernels convert operands."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def some(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most ``most`` of the indices 0 ... ``count`` - 1, at random: what a check looks at in a large output."""
    return torch.randperm(count)[:most].to(device)


def fp32_gradient_allowance(
    name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor
) -> torch.Tensor:
    """The same for gradients: 5e-3 of the root mean square of the whole output, times how much larger than that the
    element's row is, and its column, if they are.

    A gradient of a weight is a sum of outer products over rows. Where one factor is large, or few rows are summed, the
    error is as large as that factor, not as the average; where it is small because an activation's derivative happens
    to vanish there, it says nothing about the products that its own error comes from. So no row counts as less than
    average.
    """
    table = anchor.square().flatten(0, -2) if anchor.dim() > 1 else anchor.square().unsqueeze(0)
    overall = table.mean().clamp_min(torch.finfo(table.dtype).tiny)
    larger = [(table.mean(dim=axis, keepdim=True) / overall).clamp_min(1.0) for axis in (0, 1)]
    columns, rows = larger if anchor.dim() > 1 else [torch.ones_like(overall)] * 2
    return (5e-3 * (overall * rows * columns).sqrt()).expand(table.shape).view(anchor.shape)


def gelu_tanh_backward(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU by tanh of ``h``, 0.5 h (1 + tanh(sqrt(2 / pi) (h + 0.044715 h^3))), and its derivative, both unrounded."""
    factor = math.sqrt(2 / math.pi)
    t = torch.tanh(factor * (h + 0.044715 * h**3))
    slope = factor * (1 + 3 * 0.044715 * h.square())
    return 0.5 * h * (1 + t), 0.5 * (1 + t) + 0.5 * h * (1 - t.square()) * slope


def rms_norm_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of y = weight z, z = x / sqrt(mean(x^2) + eps) over the last axis, unrounded.

    Args:
        grad_y: [..., D], float32 or float64.
        x: [..., D], of the same dtype.
        weight: [D], of the same dtype.
        eps: added to the mean square.

    Returns:
        The gradient of x, [..., D], and every row's contribution to that of the weight, grad_y z, [..., D].
    """
    r = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    z = x * r
    q = grad_y * weight
    return r * (q - z * (q * z).mean(dim=-1, keepdim=True)), grad_y * z
