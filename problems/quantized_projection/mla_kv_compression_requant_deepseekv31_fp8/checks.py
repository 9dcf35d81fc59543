"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.quantized_projection import common, oracle
from mkb_env.problems.quantized_projection.mla_kv_compression_requant_deepseekv31_fp8 import problem

INDEPENDENT = "codes and scales searched in tables of e4m3 and of powers of two, torch's rms_norm, float64; some tokens"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against tables, for at most 16 tokens and the four smallest."""
    x, codes, scale, norm_weight = inputs
    oracle.check_fp8(x.device)
    quiet = x.abs().amax(dim=1).sort().indices[:4]
    tokens = torch.cat([oracle.sample(len(x), 16, x.device), quiet])
    z = oracle.fp8_rows(x[tokens]) @ oracle.fp8_weight(codes, scale).T
    c, pe = z[:, : len(norm_weight)].bfloat16().double(), z[:, len(norm_weight) :]
    n = torch.nn.functional.rms_norm(c, c.shape[1:], norm_weight.double(), eps=1e-6).bfloat16().double()
    blocks = n.unflatten(-1, (-1, 128))
    largest = blocks.abs().amax(dim=-1).float().clamp_min(1e-4)
    powers = torch.tensor([2.0**e for e in range(-40, 40)], dtype=torch.float64, device=x.device)
    want = powers[torch.searchsorted(powers, oracle.quotient(largest, torch.full_like(largest, 448)))]
    assert torch.equal(truth[1][tokens], want)
    assert torch.equal(truth[0][tokens], oracle.nearest_e4m3(blocks / want.unsqueeze(-1)).flatten(-2))
    size = pe.abs().amax(dim=1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    torch.testing.assert_close(truth[2][tokens] / size, pe / size, rtol=1e-9, atol=1e-11)
    assert (want[(x[tokens] == 0).all(dim=1)] == 2.0**-22).all()


Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Requantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _norm(c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return problem.latent_norm(c.bfloat16(), weight, torch.float32)


def _variant(
    linear: oracle.Linear = common.fp8_linear, norm: Norm = _norm, requantize: Requantizer = problem.requantize
) -> Callable[..., Any]:
    def run(
        x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        z = linear(x, codes, scale)
        return *requantize(norm(z[:, : len(weight)], weight)), z[:, len(weight) :].bfloat16()

    return run


def _norm_by_division(c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The mean as a sum of products, a square root and a division."""
    c = c.bfloat16().float()
    mean = torch.einsum("tl,tl->t", c, c).unsqueeze(-1) / c.shape[-1]
    return (c / torch.sqrt(mean + 1e-6) * weight.float()).bfloat16()


def _norm_without_eps(c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    c = c.bfloat16().float()
    return (c * torch.rsqrt(c.square().mean(dim=-1, keepdim=True) + 1e-30) * weight.float()).bfloat16()


def _norm_of_all(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
    z = common.fp8_linear(x, codes, scale).bfloat16().float()
    normed = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + 1e-6)
    n = (normed[:, : len(weight)] * weight.float()).bfloat16()
    return *problem.requantize(n), z[:, len(weight) :].bfloat16()


def _requantize(n: torch.Tensor, power: str) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = n.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10 if power == "above" else 1e-4) / 448
    if power != "none":
        scale = torch.exp2(scale.log2().floor() if power == "below" else scale.log2().ceil())
    return common.fp8_round(blocks / scale).flatten(-2), scale.squeeze(-1)


def _last_scales_missed(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A fault: the scales of the last, partial block of rows are those of the block before it."""
    return common.fp8_linear(x, codes, torch.cat([scale[:-1], scale[-2:-1]]))


WRONG = {
    **{name: _variant(linear) for name, linear in oracle.FP8_FAULTS.items()},
    "a floor of 1e-4 under the activations": _variant(oracle.fp8_linear_of(partial(oracle.floored, floor=1e-4))),
    "a floor of 1e-8 under the activations": _variant(oracle.fp8_linear_of(partial(oracle.floored, floor=1e-8))),
    "scales of the partial block missed": _variant(_last_scales_missed),
    "latent not rounded before the norm": _variant(
        norm=lambda c, weight: problem.latent_norm(c, weight, torch.float32)
    ),
    "no eps": _variant(norm=_norm_without_eps),
    "norm over all columns": _norm_of_all,
    "scales that are no powers of two": _variant(requantize=lambda n: _requantize(n, "none")),
    "the power of two below": _variant(requantize=lambda n: _requantize(n, "below")),
    "a floor of 1e-10 under the latent's largest": _variant(requantize=lambda n: _requantize(n, "above")),
}
SECOND = {
    "scales applied to sums over 128": _variant(oracle.fp8_blockwise),
    "mean by products, division by a square root": _variant(norm=_norm_by_division),
}
