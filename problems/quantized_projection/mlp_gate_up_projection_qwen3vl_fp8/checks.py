"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.quantized_projection import common, oracle

INDEPENDENT = "transformers' Qwen3MLP in float64, weights and codes by exhaustive e4m3 tables; sampled tokens"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the model's own module, whose down projection is left out, for at most 16 tokens."""
    x, codes, scale = inputs
    oracle.check_fp8(x.device)
    tokens = torch.cat(
        [oracle.sample(len(x), 16, x.device), x.float().square().sum(dim=1).topk(min(2, len(x))).indices]
    )
    gate, up = oracle.fp8_weight(codes, scale).chunk(2)
    want = oracle.qwen3_mlp(oracle.fp8_rows(x[tokens]), gate, up)
    torch.testing.assert_close(truth[0][tokens], want, rtol=1e-9, atol=1e-12)


def _variant(linear: oracle.Linear, join: Callable[..., torch.Tensor] = oracle.swiglu) -> Callable[..., torch.Tensor]:
    return lambda x, codes, scale: join(*linear(x, codes, scale).chunk(2, dim=-1)).bfloat16()


def _exp_over_one_plus(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return g * (torch.exp(g) / (1 + torch.exp(g))) * u


def _interleaved(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    y = common.fp8_linear(x, codes, scale)
    return oracle.swiglu(y[:, 0::2], y[:, 1::2]).bfloat16()


WRONG = {
    **{name: _variant(linear) for name, linear in oracle.FP8_FAULTS.items()},
    "no floor under the scale of a zero token": _variant(oracle.fp8_linear_of(oracle.no_floor)),
    "gate and up swapped": _variant(common.fp8_linear, lambda g, u: oracle.swiglu(u, g)),
    "gate and up rows taken in turn": _interleaved,
    "a sigmoid that overflows": _variant(common.fp8_linear, _exp_over_one_plus),
}
SECOND = {
    "scales applied to sums over 128": _variant(oracle.fp8_blockwise),
    "silu by tanh": _variant(common.fp8_linear, lambda g, u: 0.5 * g * (1 + torch.tanh(0.5 * g)) * u),
}
