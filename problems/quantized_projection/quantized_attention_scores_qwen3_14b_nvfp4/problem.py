"""Causal attention scores of NVFP4 queries and keys, with the logarithm of every row's sum of exponentials (Qwen3-14B).

B sequences, Hq query heads on Hk key heads, D channels, Sq queries and Sk >= Sq keys: the queries are the last of the
sequence.

Inputs, contiguous and row-major:
  q_packed  [B, Hq, Sq, D/2]   uint8          queries, NVFP4
  q_scale   [B, Hq, Sq, D/16]  float8_e4m3fn
  q_gscale  [1]                float32
  k_packed  [B, Hk, Sk, D/2]   uint8          keys, NVFP4
  k_scale   [B, Hk, Sk, D/16]  float8_e4m3fn
  k_gscale  [1]                float32

Outputs, a tuple in this order, contiguous and row-major:
  scores    [B, Hq, Sq, Sk]    bfloat16
  lse       [B, Hq, Sq]        float32

NVFP4: byte j of a row of packed holds element 2 j in bits 0 to 3 and element 2 j + 1 in bits 4 to 7. A code has its
sign in bit 3; codes 0 ... 7 have the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. scale is plain row-major, one for 16
consecutive elements of a row. Element [..., d] is code * scale[..., d // 16] * gscale.

Query head h reads key head g = h // (Hq / Hk). Key j is visible to query i if j <= i + Sk - Sq. In float32:
  z[h, i, j]      = sum_d q[h, i, d] * k[g, j, d] / sqrt(D)
  scores[h, i, j] = bfloat16(z[h, i, j]) if key j is visible to query i, else 0
  lse[h, i]       = log(sum over visible j of exp(z[h, i, j]))                     natural logarithm

Numerics: products and sums are accumulated in float32; lse is taken from z before it is rounded, with the largest
visible z subtracted from the exponents; scores are rounded once, to nearest even. lse may be off by 1e-4.

Rules:
- Every element of scores is written, zeros too. Masked keys take no part in lse.
- D is a multiple of 16; Hk divides Hq; every query sees at least one key.
- A query or key may be all zero with scale 0.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.quantized_projection.common import fp4_of, fp4_specs, fp4_values, spec_bytes

TITLE = "Causal attention scores and log-sum-exp of NVFP4 queries and keys"
NUMBER = 58
MODEL = "Qwen3-14B"
INPUTS = ("q_packed", "q_scale", "q_gscale", "k_packed", "k_scale", "k_gscale")
OUTPUTS = ("scores", "lse")
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 1, "Hq": 40, "Hk": 8, "Sq": 2048, "Sk": 2048, "D": 128, "zero_rows": 2},
    "small": {"B": 1, "Hq": 4, "Hk": 2, "Sq": 20, "Sk": 28, "D": 128, "zero_rows": 1},
    "heldout": [
        {"B": 1, "Hq": 40, "Hk": 8, "Sq": 1, "Sk": 3000, "D": 128},
        {"B": 2, "Hq": 40, "Hk": 8, "Sq": 257, "Sk": 1000, "D": 128},
        {"B": 2, "Hq": 6, "Hk": 2, "Sq": 33, "Sk": 37, "D": 80, "zero_rows": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    batch, width = shape["B"], shape["D"]
    return (
        *fp4_specs(batch, shape["Hq"], shape["Sq"], width),
        *fp4_specs(batch, shape["Hk"], shape["Sk"], width),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    rows = shape["B"], shape["Hq"], shape["Sq"]
    return ((*rows, shape["Sk"]), torch.bfloat16), (rows, torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal queries and keys, ``zero_rows`` of each 0; in ``INPUTS``' order."""
    q = normal(generator, shape["B"], shape["Hq"], shape["Sq"], shape["D"])
    k = normal(generator, shape["B"], shape["Hk"], shape["Sk"], shape["D"])
    for x in (q, k):
        rows = x.view(-1, shape["D"])
        rows[permutation(generator, len(rows))[: shape.get("zero_rows", 0)]] = 0.0
    return *fp4_of(q), *fp4_of(k)


def reference(
    q_packed: torch.Tensor,
    q_scale: torch.Tensor,
    q_gscale: torch.Tensor,
    k_packed: torch.Tensor,
    k_scale: torch.Tensor,
    k_gscale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; a float64 ``q_gscale`` makes it a float64 computation without rounding."""
    wide = q_gscale.dtype
    q, k = fp4_values(q_packed, q_scale, wide), fp4_values(k_packed, k_scale, wide)
    grouped = q.unflatten(1, (k.shape[1], -1))
    z = (grouped @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    z *= q_gscale * k_gscale * q.shape[-1] ** -0.5
    hidden = ~visible(z.shape[2], z.shape[3], z.device)
    lse = z.masked_fill(hidden, -torch.inf).logsumexp(dim=-1)
    dtype = torch.bfloat16 if wide is torch.float32 else wide
    return z.masked_fill_(hidden, 0.0).to(dtype), lse


def visible(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which key each query sees: bool [queries, keys]."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """2^-7 (|z| + rms of the row's visible z) for ``scores``, and 0 where masked; 1e-4 for ``lse``.

    The general rule would let masked scores be other than 0. For ``lse`` it would ask for 3e-6, less than what the
    float32 sums of a tensor core may be off in a z of 10.
    """
    if name == "lse":
        return torch.full_like(anchor, 1e-4)
    seen = visible(anchor.shape[2], anchor.shape[3], anchor.device)
    mean_square = anchor.square().sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)
    return torch.where(seen, 2.0**-7 * (anchor.abs() + mean_square.sqrt()), 0.0)


def COST(shape: Shape) -> Cost:
    """Every tensor once; a multiply-add per channel of every visible pair."""
    queries, keys = shape["Sq"], shape["Sk"]
    pairs = queries * (keys - queries) + queries * (queries + 1) // 2
    size = spec_bytes(*input_specs(shape), *output_specs(shape))
    return Cost(bytes=size, flops=2 * shape["B"] * shape["Hq"] * pairs * shape["D"], unit="bf16")
