"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.common import some
from mkb_env.problems.mlp_norm.groupnorm_sd15_fp32.problem import EPS, GROUPS

INDEPENDENT = "batch_norm in float64 over groups as channels (256 groups of large shapes); two groups with math.fsum"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against another of torch's norms, and against sums that Python takes exactly."""
    x, weight, bias = (tensor.double() for tensor in inputs)
    groups, results = (t.flatten(2).reshape(len(x) * GROUPS, -1, t.shape[2] * t.shape[3]) for t in (x, truth[0]))
    rows = some(len(groups), 256, x.device)
    scales, shifts = (t.view(GROUPS, -1, 1)[rows % GROUPS] for t in (weight, bias))
    # Each group is a channel of one image: batch_norm then normalises over the group.
    flat = groups[rows].flatten(1)[None]
    normalised = torch.nn.functional.batch_norm(flat, None, None, training=True, eps=EPS)
    want = normalised.view_as(groups[rows]) * scales + shifts
    torch.testing.assert_close(results[rows], want, rtol=1e-9, atol=1e-9)
    for place in range(2):
        values = flat[0, place].tolist()
        mean = math.fsum(values) / len(values)
        var = math.fsum((value - mean) ** 2 for value in values) / len(values)
        by_hand = (groups[rows[place]] - mean) / math.sqrt(var + EPS) * scales[place] + shifts[place]
        torch.testing.assert_close(results[rows[place]], by_hand, rtol=1e-9, atol=1e-9)


Moments = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _norm(moments: Moments, eps: float = EPS, stride: bool = False) -> Callable[..., torch.Tensor]:
    """GroupNorm with other moments of [B, groups, n]; with ``stride``, group j has the channels j, j + 32, ..."""

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        split = x.unflatten(1, (-1, GROUPS)).transpose(1, 2) if stride else x.unflatten(1, (GROUPS, -1))
        mean, var = (t[..., None, None] for t in moments(split.flatten(2)))
        z = (split - mean) * torch.rsqrt(var + eps)
        z = (z.transpose(1, 2) if stride else z).reshape(x.shape)
        return z * weight[:, None, None] + bias[:, None, None]

    return function


def _two_passes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = groups.mean(-1, keepdim=True)
    return mean, (groups - mean).square().mean(-1, keepdim=True)


def _of_squares(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = groups.mean(-1, keepdim=True)
    return mean, groups.square().mean(-1, keepdim=True) - mean.square()


def _shifted(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass around the group's first element."""
    first = groups[..., :1]
    mean, var = _of_squares(groups - first)
    return first + mean, var.clamp_min(0)


def _merged(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of 16 strided parts, one a thread, merged one after another (Chan's formula)."""
    mean, squares, count = torch.zeros_like(groups[..., :1]), torch.zeros_like(groups[..., :1]), 0
    for thread in range(min(16, groups.shape[-1])):
        part = groups[..., thread::16]
        size, own = part.shape[-1], part.mean(-1, keepdim=True)
        delta = own - mean
        squares = (
            squares + (part - own).square().sum(-1, keepdim=True) + delta.square() * (count * size / (count + size))
        )
        count += size
        mean = mean + delta * (size / count)
    return mean, squares / count


def _folded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """One factor and one offset per channel, as y = x factor + offset."""
    mean, var = (t.expand(-1, -1, len(weight) // GROUPS).flatten(1) for t in _two_passes(x.view(len(x), GROUPS, -1)))
    factor = weight * torch.rsqrt(var + EPS)
    return x * factor[..., None, None] + (bias - mean * factor)[..., None, None]


def _by_channel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean, var = _two_passes(x.flatten(2))
    z = (x - mean[..., None]) / torch.sqrt(var[..., None] + EPS)
    return z * weight[:, None, None] + bias[:, None, None]


def _one_weight(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    width = len(weight) // GROUPS
    return _norm(_two_passes)(x, weight[::width].repeat_interleave(width), bias)


WRONG = {
    "variance as mean of squares less square of mean": _norm(_of_squares),
    "epsilon 1e-6": _norm(_two_passes, eps=1e-6),
    "groups of strided channels": _norm(_two_passes, stride=True),
    "each channel by itself": _by_channel,
    "one weight for a group": _one_weight,
    "variance of 31 of 32 elements": _norm(lambda g: _two_passes(g[..., : g.shape[-1] * 31 // 32])),
}
SECOND = {
    "two passes": _norm(_two_passes),
    "one pass around the first element": _norm(_shifted),
    "moments of 16 parts merged": _norm(_merged),
    "factor and offset per channel": _folded,
}
