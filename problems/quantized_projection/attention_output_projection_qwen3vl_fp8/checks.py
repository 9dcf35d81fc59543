"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mkb_env.problems.quantized_projection import common, oracle

INDEPENDENT = "codes by exhaustive e4m3 tables, scales by a Kronecker product, all in float64; sampled tokens"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against tables, for at most 16 tokens and the smallest, each relative to its largest result."""
    attn, w, w_scale, residual = inputs
    oracle.check_fp8(attn.device)
    zero = (attn == 0).flatten(1).all(dim=1).nonzero().flatten()[:2]
    quiet = attn.flatten(1).abs().amax(dim=1).sort().indices[:5]
    tokens = torch.cat([oracle.sample(len(attn), 16, attn.device), quiet])
    y = oracle.fp8_rows(attn[tokens].flatten(1)) @ oracle.fp8_weight(w, w_scale).T
    want = residual[tokens].double() + y
    size = want.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(truth[0][tokens] / size, want / size, rtol=1e-10, atol=1e-10)
    assert torch.equal(truth[0][zero], residual[zero].double())


def _variant(linear: oracle.Linear, twice: bool = True) -> Callable[..., torch.Tensor]:
    def run(attn: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = linear(attn.flatten(1), w, w_scale)
        return (residual.float() + (y.bfloat16().float() if twice else y)).bfloat16()

    return run


def _small_heads_zeroed(x: torch.Tensor) -> torch.Tensor:
    blocks = x.unflatten(-1, (-1, 128))
    kept = blocks.masked_fill(blocks.abs().amax(dim=-1, keepdim=True) < 1e-2, 0.0).flatten(-2)
    return common.fp8_rows(*common.fp8_quantize(kept), torch.float32)


def _small_codes_flushed(x: torch.Tensor) -> torch.Tensor:
    codes, scale = common.fp8_quantize(x)
    values = codes.float()
    return common.fp8_rows(values.masked_fill(values.abs() < 4, 0.0), scale, torch.float32)


WRONG = {
    **{name: _variant(linear) for name, linear in oracle.FP8_FAULTS.items()},
    "no floor under the scale of a zero token": _variant(oracle.fp8_linear_of(oracle.no_floor)),
    "a floor of 0.1": _variant(oracle.fp8_linear_of(partial(oracle.floored, floor=0.1))),
    "a floor of 1e-8": _variant(oracle.fp8_linear_of(partial(oracle.floored, floor=1e-8))),
    "heads below 0.01 zeroed": _variant(oracle.fp8_linear_of(_small_heads_zeroed)),
    "codes below 4 flushed": _variant(oracle.fp8_linear_of(_small_codes_flushed)),
    "no residual": lambda attn, w, w_scale, residual: common.fp8_linear(attn.flatten(1), w, w_scale).bfloat16(),
}
SECOND = {
    "scales applied to sums over 128": _variant(oracle.fp8_blockwise),
    "one rounding instead of two": _variant(common.fp8_linear, twice=False),
}
