"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.quantized_projection import common, oracle

INDEPENDENT = "transformers' Qwen3MLP in float64, weights and codes by exhaustive e2m1 and e4m3 tables; sampled tokens"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the model's own module, whose down projection is left out, for at most 20 tokens."""
    x, x_gscale, *weights = inputs
    oracle.check_fp4(x.device)
    quiet = x.float().square().sum(dim=1).sort().indices[:4]
    tokens = torch.cat([oracle.sample(len(x), 16, x.device), quiet])
    want = oracle.qwen3_mlp(oracle.fp4_rows(x[tokens], x_gscale), oracle.fp4(*weights[:3]), oracle.fp4(*weights[3:]))
    torch.testing.assert_close(truth[0][tokens], want, rtol=1e-8, atol=1e-13)


Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _variant(
    quantizer: oracle.Fp4Quantizer | None = common.fp4_quantize,
    linear: Callable[..., torch.Tensor] = common.fp4_linear,
    join: Join = oracle.swiglu,
) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, x_gscale: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        rows, factor = x.float(), torch.ones_like(x_gscale)
        if quantizer is not None:
            rows, factor = common.fp4_values(*quantizer(x, x_gscale), torch.float32), x_gscale
        g, u = (linear(rows, *weights[first : first + 2], factor * weights[first + 2]) for first in (0, 3))
        return join(g, u).bfloat16()

    return run


def _one_factor(*inputs: torch.Tensor) -> torch.Tensor:
    return _variant()(*inputs[:7], inputs[4])


def _factors_last(x: torch.Tensor, x_gscale: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    one = torch.ones_like(x_gscale)
    rows = common.fp4_values(*common.fp4_quantize(x, x_gscale), torch.float32) * x_gscale
    g, u = (common.fp4_linear(rows, weights[first], weights[first + 1], one) for first in (0, 3))
    return (oracle.swiglu(g, u) * weights[2] * weights[5]).bfloat16()


def _beyond_448(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of a wider format, so that nothing saturates."""
    codes, scale = common.fp4_quantize(x, gscale)
    wide_codes, wide_scale = common.fp4_quantize(x.float() / 4, gscale)
    full = scale.float() == 448
    scale = torch.where(full, 4 * wide_scale.float(), scale.float())
    return torch.where(full.repeat_interleave(8, dim=-1), wide_codes, codes), scale


WRONG = {
    **{name: _variant(quantizer) for name, quantizer in oracle.FP4_FAULTS.items()},
    "scales not limited to 448": _variant(_beyond_448),
    "activations not quantised": _variant(None),
    "the gate's factor for both weights": _one_factor,
    "factors applied after silu": _factors_last,
    "gate and up swapped": _variant(join=lambda g, u: oracle.swiglu(u, g)),
    "high nibble first": _variant(linear=oracle.fp4_nibbles_swapped),
    "one scale for 32 elements": _variant(linear=oracle.fp4_scale_of_pair),
}
SECOND = {
    "four partial sums": _variant(linear=oracle.fp4_linear_split),
    "silu by tanh": _variant(join=lambda g, u: 0.5 * g * (1 + torch.tanh(0.5 * g)) * u),
    "weights rounded to bfloat16 with their factor": _variant(linear=oracle.fp4_linear_rounded),
}
