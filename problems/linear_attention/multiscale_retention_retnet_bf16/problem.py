"""Retention over whole sequences with one fixed decay per head (RetNet), without group norm and gate.

B sequences, H heads, T tokens, K channels of a key and V of a value; heads come before tokens.

Inputs, contiguous and row-major:
  q  [B, H, T, K]  bfloat16
  k  [B, H, T, K]  bfloat16
  v  [B, H, T, V]  bfloat16

Output, contiguous and row-major:
  o  [B, H, T, V]  bfloat16

Head h = 0 ... H - 1 has the decay c_h = 1 - 2^(-5 - h), which depends on h alone, not on H. For every b, h and i:
  o[b, h, i] = bfloat16(sum over j = 0 ... i of dot(q[b, h, i], k[b, h, j]) / sqrt(K) * c_h^(i - j) * v[b, h, j])
There is no softmax and no normalisation of rows.

Numerics: inputs are widened exactly; weights and sums are taken in float32 and o is rounded once, to nearest even.
Products of operands rounded to bfloat16, weights included, with sums in float32 are within the tolerance, and so is any
order of evaluation that equals the formula, such as carrying a K x V state from one group of tokens to the next.

Rules:
- Token i sees itself with a factor of 1, and no later token.
- B and T are any positive numbers, T need not be a multiple of anything; H is at most 16.
- The inputs are not changed; o is a new tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal
from mkb_env.problems.linear_attention.common import row_allowance, scan_scale

TITLE = "Retention with a fixed decay per head, 8 heads, keys of 256, values of 512"
NUMBER = 70
MODEL = "RetNet"
INPUTS = ("q", "k", "v")
OUTPUTS = ("o",)
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 8, "H": 8, "T": 1024, "K": 256, "V": 512},
    "small": {"B": 1, "H": 7, "T": 80, "K": 32, "V": 64},
    "heldout": [
        {"B": 3, "H": 8, "T": 777, "K": 256, "V": 512},
        {"B": 1, "H": 5, "T": 1, "K": 256, "V": 512},
        {"B": 1, "H": 9, "T": 75, "K": 64, "V": 32},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    leading = shape["B"], shape["H"], shape["T"]
    key, value = (((*leading, shape[width]), torch.bfloat16) for width in "KV")
    return key, key, value


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (input_specs(shape)[2],)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal q, k and v."""
    return tuple(normal(generator, *sizes, dtype=dtype) for sizes, dtype in input_specs(shape))


def log_decays(q: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of each head's decay [H, 1], wide."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(q.shape[1], dtype=wide, device=q.device))).unsqueeze(-1)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(q.shape[2], dtype=wide, device=q.device)
    distance = position.unsqueeze(-1) - position
    decay = torch.exp2(distance.clamp_min(0) * (log_decays(q) / math.log(2)).unsqueeze(-1)).tril()
    weights = q.to(wide) @ k.to(wide).mT
    return ((weights * (decay * q.shape[-1] ** -0.5)) @ v.to(wide)).to(v.dtype)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but rows that are small by chance (few keys count, all nearly orthogonal to the query) are
    measured by what such a row has on average: a carried state may be rounded to bfloat16.
    """
    q, k, v = (x.double() for x in inputs)
    alpha = log_decays(q).expand(q.shape[:-1])
    return row_allowance(anchor, scan_scale(v, alpha, k, q * q.shape[-1] ** -0.5))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; the cheaper of all pairs of tokens and of chunks of 64 with a carried state."""
    rows, keys, values = shape["B"] * shape["H"] * shape["T"], shape["K"], shape["V"]
    pairs, chunks = shape["T"] * (keys + values), 2 * (2 * keys * values + 64 * (keys + values))
    return Cost(4 * rows * (keys + values), rows * min(pairs, chunks), "bf16")
