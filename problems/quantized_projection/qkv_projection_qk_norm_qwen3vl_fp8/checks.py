"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.quantized_projection import common, oracle
from mkb_env.problems.quantized_projection.qkv_projection_qk_norm_qwen3vl_fp8.problem import head_norm

INDEPENDENT = "torch.nn.functional.rms_norm head by head, codes by exhaustive e4m3 tables, float64; sampled tokens"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against tables and torch's own norm, for at most 16 tokens and the smallest, by heads."""
    x, codes, scale, q_weight, k_weight, queries, keys = inputs
    oracle.check_fp8(x.device)
    quiet = x.abs().amax(dim=1).sort().indices[:4]
    tokens = torch.cat([oracle.sample(len(x), 16, x.device), quiet])
    rows, weight = oracle.fp8_rows(x[tokens]), oracle.fp8_weight(codes, scale)
    for head in range(queries + 2 * keys):
        z = rows @ weight[128 * head : 128 * head + 128].T
        if head < queries:
            got, want = truth[0][:, head], torch.nn.functional.rms_norm(z, (128,), q_weight.double(), 1e-6)
        elif head < queries + keys:
            got, want = truth[1][:, head - queries], torch.nn.functional.rms_norm(z, (128,), k_weight.double(), 1e-6)
        else:
            got, want = truth[2][:, head - queries - keys], z
        size = want.abs().amax(dim=1, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        torch.testing.assert_close(got[tokens] / size, want / size, rtol=1e-9, atol=1e-11)


Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _variant(linear: oracle.Linear, norm: Norm = head_norm, swap: bool = False) -> Callable[..., Any]:
    def run(
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        queries: int,
        keys: int,
    ) -> tuple[torch.Tensor, ...]:
        z = linear(x, codes, scale).unflatten(-1, (-1, 128))
        q, k, v = z[:, :queries], z[:, queries : queries + keys], z[:, queries + keys :]
        k, v = (v, k) if swap else (k, v)
        return norm(q, q_weight).bfloat16(), norm(k, k_weight).bfloat16(), v.bfloat16()

    return run


def _model_rounding(z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return head_norm(z.bfloat16().float(), weight)


WRONG = {
    **{name: _variant(linear) for name, linear in oracle.FP8_FAULTS.items()},
    "no floor under the scale of a zero token": _variant(oracle.fp8_linear_of(oracle.no_floor)),
    "a floor of 1e-4": _variant(oracle.fp8_linear_of(partial(oracle.floored, floor=1e-4))),
    "a floor of 1e-8": _variant(oracle.fp8_linear_of(partial(oracle.floored, floor=1e-8))),
    "one norm over all heads": _variant(
        common.fp8_linear, lambda z, weight: head_norm(z.flatten(1), weight.repeat(z.shape[1])).view(z.shape)
    ),
    "an eps of 1e-5": _variant(common.fp8_linear, partial(head_norm, eps=1e-5)),
    "keys and values swapped": _variant(common.fp8_linear, swap=True),
    "no norm weight": _variant(common.fp8_linear, lambda z, weight: head_norm(z, torch.ones_like(weight))),
}
SECOND = {
    "scales applied to sums over 128": _variant(oracle.fp8_blockwise),
    "projection rounded to bfloat16 before the norm, as the model does": _variant(common.fp8_linear, _model_rounding),
}
