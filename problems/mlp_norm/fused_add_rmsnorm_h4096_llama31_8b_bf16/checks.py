"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.fused_add_rmsnorm_h4096_llama31_8b_bf16.problem import EPS

INDEPENDENT = "torch.nn.functional.rms_norm of the float64 sum, and three rows by hand with math.fsum"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's own operator, and against sums that Python takes exactly."""
    hidden, residual, weight = (tensor.double() for tensor in inputs)
    want = torch.nn.functional.rms_norm(hidden + residual, hidden.shape[-1:], weight, eps=EPS)
    torch.testing.assert_close(truth[0], want, rtol=1e-12, atol=0)
    for row in {0, len(hidden) // 2, len(hidden) - 1}:
        s = [h + r for h, r in zip(hidden[row].tolist(), residual[row].tolist(), strict=True)]
        r = 1 / math.sqrt(math.fsum(value * value for value in s) / len(s) + EPS)
        by_hand = [value * r * w for value, w in zip(s, weight.tolist(), strict=True)]
        torch.testing.assert_close(truth[0][row].cpu(), torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=0)


Mean = Callable[[torch.Tensor], torch.Tensor]


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().mean(-1, keepdim=True)


def _threads(rows: torch.Tensor) -> torch.Tensor:
    """256 threads with 16 strided elements each, a tree in every warp, then the warps one after another."""
    sums = rows.square().unflatten(-1, (-1, 256)).cumsum(-2)[..., -1, :].unflatten(-1, (8, 32))
    while sums.shape[-1] > 1:
        sums = sums[..., : sums.shape[-1] // 2] + sums[..., sums.shape[-1] // 2 :]
    return sums[..., 0].cumsum(-1)[..., -1:] / rows.shape[-1]


def _sequential(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().cumsum(-1)[..., -1:] / rows.shape[-1]


def _norm(mean: Mean = _mean, eps: float = EPS, added: float = 1.0) -> Callable[..., torch.Tensor]:
    """The operation by division, with another mean square, another epsilon or another share of the residual."""

    def function(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        s = hidden.float() + added * residual.float()
        return (s / torch.sqrt(mean(s) + eps) * weight.float()).bfloat16()

    return function


def _fp8(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _norm()(hidden, residual, weight).to(torch.float8_e4m3fn).bfloat16()


WRONG = {
    "no weight": lambda hidden, residual, weight: _norm()(hidden, residual, torch.ones_like(weight)),
    "no residual": _norm(added=0.0),
    "residual subtracted": _norm(added=-1.0),
    "the mean of one warp's 128 columns": _norm(mean=lambda rows: _mean(rows[:, :128])),
    "no reduction at all": _norm(mean=lambda rows: torch.full_like(rows[:, :1], 2.0)),
    "no epsilon": _norm(eps=0.0),
    "epsilon 1e-6": _norm(eps=1e-6),
    "the result rounded to fp8": _fp8,
}
SECOND = {
    "division by a square root": _norm(),
    "sums in the order of a block": _norm(mean=_threads),
    "sums in the order of the columns": _norm(mean=_sequential),
}
