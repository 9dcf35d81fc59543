"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

EPS = 1e-6
INDEPENDENT = "torch.nn.functional.rms_norm in float64, and three rows by hand with math.fsum"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's own operator, and against sums that Python takes exactly."""
    hidden, weight = (tensor.double() for tensor in inputs)
    want = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight, eps=EPS)
    torch.testing.assert_close(truth[0], want, rtol=1e-12, atol=0)
    for row in {0, len(hidden) // 2, len(hidden) - 1}:
        x = hidden[row].tolist()
        r = 1 / math.sqrt(math.fsum(value * value for value in x) / len(x) + EPS)
        by_hand = [value * r * w for value, w in zip(x, weight.tolist(), strict=True)]
        torch.testing.assert_close(truth[0][row].cpu(), torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=0)


def _norm(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return (x / torch.sqrt(mean + EPS) * weight.float()).bfloat16()


def _by_division(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = hidden.float()
    return _norm(x, weight, x.square().mean(-1, keepdim=True))


def _warp_order(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """32 lanes with strided partial sums, then a tree."""
    x = hidden.float()
    parts = x.square().unflatten(-1, (-1, 32)).cumsum(-2)[..., -1, :]
    while parts.shape[-1] > 1:
        parts = parts[..., : parts.shape[-1] // 2] + parts[..., parts.shape[-1] // 2 :]
    return _norm(x, weight, parts / x.shape[-1])


def _mean_of_120(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = hidden.float()
    return _norm(x, weight, x[:, :120].square().mean(-1, keepdim=True))


WRONG = {
    "no weight": lambda hidden, weight: _by_division(hidden, torch.ones_like(weight)),
    "no reduction at all": lambda hidden, weight: (hidden.float() * weight.float()).bfloat16(),
    "the mean of 120 of the 128 columns": _mean_of_120,
}
SECOND = {"division by a square root": _by_division, "sums in the order of a warp": _warp_order}
