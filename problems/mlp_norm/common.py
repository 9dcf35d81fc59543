"""Operations and rules that several MLP and norm problems, or their checks, share."""

from __future__ import annotations

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

    One or two products with operands rounded to TF32 (nearest) err by up to 2.3e-3 of it at inner sizes from 48 to
    12288; operands rounded to bfloat16 err by 1.1e-2 and more.
    """
    return 5e-3 * anchor.square().mean(dim=-1, keepdim=True).sqrt()


def nearest_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to TF32's 10 fraction bits, ties away from zero, as tensor-core kernels convert operands."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def some(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most ``most`` of the indices 0 ... ``count`` - 1, at random: what a check looks at in a large output."""
    return torch.randperm(count)[:most].to(device)
