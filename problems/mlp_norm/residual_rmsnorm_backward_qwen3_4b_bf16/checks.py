"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

EPS = 1e-6
INDEPENDENT = "autograd through torch.nn.functional.rms_norm in float64, and gradcheck of that function"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The formulas against autograd of the forward pass, which in turn agrees with difference quotients."""
    grad_y, grad_residual, h, weight = (tensor.double() for tensor in inputs)
    hidden, w = h.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.enable_grad():
        y = torch.nn.functional.rms_norm(hidden, h.shape[-1:], w, eps=EPS)
        wanted = torch.autograd.grad((y, hidden), (hidden, w), (grad_y, grad_residual))
    for got, want in zip(truth, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11 * float(want.abs().max()))
    tiny = [tensor.detach()[..., :4].clone().requires_grad_() for tensor in (hidden[:2] + 0.5, w)]
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda x, v: torch.nn.functional.rms_norm(x, (4,), v, eps=EPS), tiny)


def _by_channel(
    grad_y: torch.Tensor,
    grad_residual: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = EPS,
    projection: float = 1.0,
    rounded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_h as r q - h (r^3 mean(q h)), sums over tokens in blocks of 64; ``rounded``: z and q in bfloat16."""
    dy, x, w = grad_y.float(), h.float(), weight.float()
    r = 1 / torch.sqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    q, z = dy * w, x * r
    if rounded:
        q, z = q.bfloat16().float(), z.bfloat16().float()
        grad_h = r * q - z * (r * (q * z).mean(-1, keepdim=True))
    else:
        grad_h = r * q - x * (projection * r**3 * (q * x).mean(-1, keepdim=True))
    partial_sums = torch.stack([part.sum(0) for part in (dy * z).split(64)])
    return (grad_h + grad_residual.float()).bfloat16(), partial_sums.sum(0).bfloat16()


def _raw_sum(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_y, _, h, _ = inputs
    return _by_channel(*inputs)[0], (grad_y.float() * h.float()).sum(0).bfloat16()


def _weight_gradient_weighted(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_h, grad_weight = _by_channel(*inputs)
    return grad_h, grad_weight * inputs[3]


WRONG = {
    "no gradient of the residual stream": lambda dy, dr, h, w: _by_channel(dy, torch.zeros_like(dr), h, w),
    "the residual stream's gradient sent through the norm": lambda dy, dr, h, w: _by_channel(
        dy + dr, torch.zeros_like(dr), h, w
    ),
    "no projection along z": lambda *inputs: _by_channel(*inputs, projection=0.0),
    "grad_weight of h in place of z": _raw_sum,
    "grad_weight times the weight": _weight_gradient_weighted,
    "no weight in grad_h": lambda dy, dr, h, w: _by_channel(dy, dr, h, torch.ones_like(w)),
    "epsilon 1e-5": lambda *inputs: _by_channel(*inputs, eps=1e-5),
}
SECOND = {
    "expanded formula, sums over tokens in blocks": _by_channel,
    "z and q rounded to bfloat16": lambda *inputs: _by_channel(*inputs, rounded=True),
}
