"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.quantized_projection import common, oracle

INDEPENDENT = "torch's rms_norm group by group in float64, transformers' Zamba2RMSNormGated, weight by e2m1 tables"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's norm for at most 16 tokens and the four smallest; float32 against the model's norm."""
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    y, z, norm_w, *packed, groups = inputs
    oracle.check_fp4(y.device)
    quiet = (y.float() * z.float().sigmoid()).square().sum(dim=1).sort().indices[:4]
    tokens = torch.cat([oracle.sample(len(y), 16, y.device), quiet])
    gate, weight, size = z[tokens].double(), oracle.fp4(*packed), len(norm_w) // groups
    u = y[tokens].double() * gate / (1 + torch.exp(-gate))
    parts = [torch.nn.functional.rms_norm(part, (size,), eps=1e-5) for part in u.split(size, dim=1)]
    normed = torch.cat(parts, dim=1) * norm_w.double()
    torch.testing.assert_close(truth[0][tokens], normed @ weight.T, rtol=1e-9, atol=1e-18)
    model = Zamba2RMSNormGated(len(norm_w), size, eps=1e-5).to(y.device)
    model.weight.data = norm_w.float()
    with torch.no_grad():
        torch.testing.assert_close(model(y[tokens].float(), z[tokens].float()).double(), normed, rtol=1e-4, atol=1e-12)


Norm = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def _gated(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return y.float() * (z.float() * torch.sigmoid(z.float()))


def _rms(u: torch.Tensor, groups: int, eps: float = 1e-5) -> torch.Tensor:
    """Every channel divided by its group's root mean square."""
    parts = u.unflatten(-1, (groups, -1))
    return (parts / torch.sqrt(parts.square().sum(-1, keepdim=True) / parts.shape[-1] + eps)).flatten(-2)


def _variant(
    norm: Norm = lambda y, z, groups: _rms(_gated(y, z), groups),
    linear: Callable[..., torch.Tensor] = common.fp4_linear,
    rounded: bool = True,
) -> Callable[..., torch.Tensor]:
    def run(y: torch.Tensor, z: torch.Tensor, norm_w: torch.Tensor, *others: Any) -> torch.Tensor:
        m = norm(y, z, others[-1]) * norm_w.float()
        return linear(m.bfloat16().float() if rounded else m, *others[:3]).bfloat16()

    return run


def _roots_last(y: torch.Tensor, z: torch.Tensor, norm_w: torch.Tensor, *others: Any) -> torch.Tensor:
    """The weighted u in bfloat16, and a factor for the partial sum of every group."""
    packed, scale, gscale, groups = others
    u = _gated(y, z)
    roots = torch.rsqrt(u.unflatten(-1, (groups, -1)).square().mean(-1) + 1e-5)
    parts = (u * norm_w.float()).bfloat16().float().chunk(groups, dim=-1)
    weights = common.fp4_values(packed, scale, torch.float32).chunk(groups, dim=-1)
    total = torch.zeros(len(y), len(packed), device=y.device)
    for group, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        total += part @ weight.T * roots[:, group : group + 1]
    return (total * gscale).bfloat16()


WRONG = {
    "norm over the whole row": _variant(lambda y, z, groups: _rms(_gated(y, z), 1)),
    "norm before the gate": _variant(lambda y, z, groups: _gated(_rms(y.float(), groups), z)),
    "no eps": _variant(lambda y, z, groups: _rms(_gated(y, z), groups, eps=1e-30)),
    "an eps of 1e-6": _variant(lambda y, z, groups: _rms(_gated(y, z), groups, eps=1e-6)),
    "gate and input swapped": _variant(lambda y, z, groups: _rms(_gated(z, y), groups)),
    "high nibble first": _variant(linear=oracle.fp4_nibbles_swapped),
    "one scale for 32 elements": _variant(linear=oracle.fp4_scale_of_pair),
}
SECOND = {
    "roots applied to partial sums": _roots_last,
    "normed channels not rounded": _variant(rounded=False),
    "weights rounded to bfloat16 with their factor": _variant(linear=oracle.fp4_linear_rounded),
}
