"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.quantized_projection import common, oracle

INDEPENDENT = "codes and scales searched in exhaustive tables of e2m1 and e4m3, all in float64; sampled tokens"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against tables, for at most 16 tokens and the four smallest."""
    attn, x_gscale, *weight, residual = inputs
    oracle.check_fp4(attn.device)
    quiet = attn.float().square().sum(dim=1).sort().indices[:4]
    tokens = torch.cat([oracle.sample(len(attn), 16, attn.device), quiet])
    want = residual[tokens].double() + oracle.fp4_rows(attn[tokens], x_gscale) @ oracle.fp4(*weight).T
    torch.testing.assert_close(truth[0][tokens], want, rtol=1e-10, atol=1e-12)


def _variant(
    quantizer: oracle.Fp4Quantizer = common.fp4_quantize,
    linear: Callable[..., torch.Tensor] = common.fp4_linear,
    twice: bool = True,
) -> Callable[..., torch.Tensor]:
    def run(attn: torch.Tensor, x_gscale: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        packed, scale, gscale, residual = others
        x = common.fp4_values(*quantizer(attn, x_gscale), torch.float32)
        y = linear(x, packed, scale, x_gscale * gscale)
        return (residual.float() + (y.bfloat16().float() if twice else y)).bfloat16()

    return run


def _not_quantised(attn: torch.Tensor, x_gscale: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return (others[3].float() + common.fp4_linear(attn.float(), *others[:3])).bfloat16()


WRONG = {
    **{name: _variant(quantizer) for name, quantizer in oracle.FP4_FAULTS.items()},
    "activations not quantised": _not_quantised,
    "high nibble first": _variant(linear=oracle.fp4_nibbles_swapped),
    "one scale for 32 elements": _variant(linear=oracle.fp4_scale_of_pair),
    "no factor of the activations": lambda attn, g, *others: _variant()(attn, g, *others[:2], others[2] / g, others[3]),
}
SECOND = {
    "one rounding instead of two": _variant(twice=False),
    "four partial sums": _variant(linear=oracle.fp4_linear_split),
    "weights rounded to bfloat16 with their factor": _variant(linear=oracle.fp4_linear_rounded),
}
