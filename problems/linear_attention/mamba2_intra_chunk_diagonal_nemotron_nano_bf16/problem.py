"""The diagonal blocks of the Mamba-2 dual form: what tokens of one chunk give each other (Nemotron-Nano-9B-v2 mixer).

B sequences of nc chunks of Q tokens, H heads of P channels, G groups (H is a multiple of G) of state width N.

Inputs, contiguous and row-major:
  x      [B, nc, Q, H, P]  bfloat16
  delta  [B, nc, Q, H]     float32   time steps, positive
  dA     [B, nc, Q, H]     float32   logarithm of each token's decay, negative
  Bm     [B, nc, Q, G, N]  bfloat16
  Cm     [B, nc, Q, G, N]  bfloat16

Output, contiguous and row-major:
  y      [B, nc, Q, H, P]  bfloat16

For sequence b, chunk c, position l, head h and its group g = h // (H / G), in float32:
  w[s] = dot(Cm[b, c, l, g], Bm[b, c, s, g]) * exp(dA[b, c, s + 1, h] + ... + dA[b, c, l, h]) * delta[b, c, s, h]
  y[b, c, l, h] = bfloat16(sum over s = 0 ... l of w[s] x[b, c, s, h])

Numerics: inputs are widened exactly, products and sums are taken in float32 and the result is rounded once, to nearest
even. For s = l the exponential's argument is an empty sum, 0. Products of operands rounded to bfloat16, w included,
with sums in float32 are within the tolerance.

Rules:
- Positions after l do not count, however large the exponential of the reversed sum would be: sums of dA over a chunk
  reach hundreds below 0.
- Chunks do not see each other.
- P need not be a power of two, nor Q.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import softplus

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation, uniform
from mkb_env.problems.linear_attention.common import row_allowance, scan_scale, scan_within, segment_sums

TITLE = "Diagonal blocks of the Mamba-2 dual form, 128 heads of 80, 8 groups"
NUMBER = 65
MODEL = "Nemotron-Nano-9B-v2"
INPUTS = ("x", "delta", "dA", "Bm", "Cm")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
WIDTHS = {"H": 128, "P": 80, "G": 8, "N": 128}
WORKLOADS = {
    "full": {"B": 1, "nc": 32, "Q": 128, **WIDTHS, "large_steps": 8},
    "small": {"B": 1, "nc": 2, "Q": 16, "H": 4, "P": 20, "G": 2, "N": 16, "large_steps": 1},
    "heldout": [
        {"B": 2, "nc": 5, "Q": 128, **WIDTHS, "large_steps": 4},
        {"B": 1, "nc": 1, "Q": 96, "H": 16, "P": 80, "G": 8, "N": 128},
        {"B": 1, "nc": 3, "Q": 17, "H": 6, "P": 24, "G": 3, "N": 32, "large_steps": 1},
    ],
}


def _leading(shape: Shape) -> tuple[int, int, int]:
    return shape["B"], shape["nc"], shape["Q"]


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    step = (*_leading(shape), shape["H"]), torch.float32
    entry = (*_leading(shape), shape["G"], shape["N"]), torch.bfloat16
    return (*output_specs(shape), step, step, entry, entry)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((*_leading(shape), shape["H"], shape["P"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal x, B and C, time steps of a few hundredths, decay rates from 1 to 16, in ``INPUTS``' order.

    At random places, ``large_steps`` tokens have a time step of 20 in all heads.
    """
    leading, heads = _leading(shape), shape["H"]
    x = normal(generator, *leading, heads, shape["P"], dtype=torch.bfloat16)
    delta = softplus(normal(generator, *leading, heads, mean=-3.0))
    chosen = permutation(generator, leading[0] * leading[1] * leading[2])[: shape.get("large_steps", 0)]
    delta.flatten(0, 2)[chosen] = 20
    rate = uniform(generator, heads, low=1.0, high=16.0)
    entry, scale = (*leading, shape["G"], shape["N"]), shape["N"] ** -0.25
    Bm, Cm = (normal(generator, *entry, dtype=torch.bfloat16, scale=scale) for _ in range(2))
    return x, delta, -delta * rate, Bm, Cm


def prepared(
    x: torch.Tensor, delta: torch.Tensor, dA: torch.Tensor, Bm: torch.Tensor, Cm: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Wide and head first: x times its time step, logarithms of the decays, B and C."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, Bm, Cm = (part.to(wide).permute(0, 3, 1, 2, 4) for part in (x, Bm, Cm))
    delta, dA = (part.to(wide).permute(0, 3, 1, 2) for part in (delta, dA))
    return x * delta.unsqueeze(-1), dA, Bm, Cm


def reference(
    x: torch.Tensor, delta: torch.Tensor, dA: torch.Tensor, Bm: torch.Tensor, Cm: torch.Tensor
) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    scaled, alpha, entries, exits = prepared(x, delta, dA, Bm, Cm)
    y = scan_within(scaled, segment_sums(alpha), entries, exits)
    return y.permute(0, 2, 3, 1, 4).to(x.dtype).contiguous()


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but rows that are small by chance (few tokens count, all with small products of C and B) are
    measured by what such a row has on average.
    """
    scaled, alpha, entries, exits = (part.transpose(1, 2) for part in prepared(*(x.double() for x in inputs)))
    folded = (part.flatten(0, 1) for part in (scaled, alpha, entries, exits))
    return row_allowance(anchor, scan_scale(*folded).transpose(1, 2).reshape(*anchor.shape[:-1], 1))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; the products of a chunk, multiplied with its masked half."""
    tokens, heads, channels = shape["B"] * shape["nc"] * shape["Q"], shape["H"], shape["P"]
    inner = shape["G"] * shape["N"]
    moved = tokens * (4 * (heads * channels + inner) + 8 * heads)
    return Cost(moved, 2 * tokens * shape["Q"] * (inner + heads * channels), "bf16")
