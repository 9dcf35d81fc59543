"""Mamba-2 scan in chunks that also returns the state at every chunk's start (Granite-4.0 mixer, prefill).

B sequences of T tokens, H heads of P channels that share one group of state width N. A chunk is chunk_size tokens, the
last one possibly fewer; there are nc = ceil(T / chunk_size).

Inputs, contiguous and row-major:
  x           [B, T, H, P]  bfloat16
  dt          [B, T, H]     bfloat16  time steps before bias and softplus
  A           [H]           float32   decay rate, negative
  Bm          [B, T, 1, N]  bfloat16  how a token enters the state
  Cm          [B, T, 1, N]  bfloat16  how the state is read
  D           [H]           float32   factor of the skip
  dt_bias     [H]           float32
  chunk_size  int

Outputs, a tuple in this order, contiguous and row-major:
  y             [B, T, H, P]      bfloat16
  chunk_states  [B, nc, H, P, N]  bfloat16
  final_state   [B, H, P, N]      bfloat16

For sequence b and head h the state S is a P x N matrix, 0 at first, and for t = 0, 1, ..., T - 1, with x_t, B_t, C_t
those of token t:
  chunk_states[b, t / chunk_size, h] = bfloat16(S)  if t is a multiple of chunk_size
  delta = softplus(dt[b, t, h] + dt_bias[h])        softplus(z) = log(1 + exp(z))
  S = exp(A[h] delta) S + delta outer(x_t, B_t)
  y[b, t, h] = bfloat16(S C_t + D[h] x_t)
and final_state[b, h] = bfloat16(S) after the last token. So chunk_states[:, 0] is 0, and entry c has seen c chunks.

Numerics: inputs are widened exactly; everything is computed in float32 and each output is rounded once, to nearest
even. The decay from token j to token i of a chunk is exp(A[h] (delta_{j+1} + ... + delta_i)); in float32 that sum must
be as accurate as if its own terms were added, even where sums from the chunk's start reach many hundreds. Any order of
evaluation that equals the recurrence is allowed, and so are products of operands rounded to bfloat16 with sums in
float32.

Rules:
- The skip takes x_t itself, not delta x_t. delta is not clamped.
- B and T are any positive numbers, T need not be a multiple of chunk_size and may be smaller.
- The inputs are not changed; the outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import softplus

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation, uniform
from mkb_env.problems.linear_attention.common import (
    chunk_scan,
    row_allowance,
    scan_scale,
    state_allowance,
    step_bias,
)

TITLE = "Mamba-2 chunk scan that returns the states at chunk starts, 128 heads of 64, one group"
NUMBER = 64
MODEL = "Granite-4.0-H-Small"
INPUTS = ("x", "dt", "A", "Bm", "Cm", "D", "dt_bias", "chunk_size")
OUTPUTS = ("y", "chunk_states", "final_state")
HOST_VISIBLE = ()
WIDTHS = {"H": 128, "P": 64, "N": 128}
WORKLOADS = {
    "full": {"B": 1, "T": 4096, "Q": 256, **WIDTHS, "large_steps": 3},
    "small": {"B": 1, "T": 40, "Q": 16, "H": 4, "P": 16, "N": 16, "large_steps": 1},
    "heldout": [
        {"B": 2, "T": 1300, "Q": 256, **WIDTHS, "large_steps": 2},
        {"B": 1, "T": 100, "Q": 128, **WIDTHS},
        {"B": 2, "T": 53, "Q": 32, "H": 6, "P": 16, "N": 32},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, heads, per_head = (shape["B"], shape["T"]), shape["H"], ((shape["H"],), torch.float32)
    entry = (*tokens, 1, shape["N"]), torch.bfloat16
    return (
        ((*tokens, heads, shape["P"]), torch.bfloat16),
        ((*tokens, heads), torch.bfloat16),
        per_head,
        entry,
        entry,
        per_head,
        per_head,
        shape["Q"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    batch, heads, channels = shape["B"], shape["H"], shape["P"]
    state = heads, channels, shape["N"]
    return (
        ((batch, shape["T"], heads, channels), torch.bfloat16),
        ((batch, -(-shape["T"] // shape["Q"]), *state), torch.bfloat16),
        ((batch, *state), torch.bfloat16),
    )


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | int, ...]:
    """Standard normal sequences, rates and steps as the model starts with, in ``INPUTS``' order.

    At random places, ``large_steps`` tokens have dt = 25 in all heads.
    """
    tokens, heads, channels = (shape["B"], shape["T"]), shape["H"], shape["P"]
    x = normal(generator, *tokens, heads, channels, dtype=torch.bfloat16)
    dt = normal(generator, *tokens, heads, dtype=torch.bfloat16)
    A = -uniform(generator, heads, low=1.0, high=16.0)
    Bm, Cm = (normal(generator, *tokens, 1, shape["N"], dtype=torch.bfloat16) for _ in range(2))
    D = normal(generator, heads, scale=0.1, mean=1.0)
    dt.flatten(0, 1)[permutation(generator, shape["B"] * shape["T"])[: shape.get("large_steps", 0)]] = 25
    return x, dt, A, Bm, Cm, D, step_bias(generator, heads), shape["Q"]


def prepared(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    Bm: torch.Tensor,
    Cm: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The scan's arguments, head first, its state the last of them, and the skip."""
    wide = torch.promote_types(x.dtype, torch.float32)
    delta = softplus(dt.to(wide) + dt_bias.to(wide)).transpose(1, 2)
    x, Bm, Cm = (part.to(wide).transpose(1, 2) for part in (x, Bm, Cm))
    state = x.new_zeros(*x.shape[:2], x.shape[-1], Bm.shape[-1])
    return (x * delta.unsqueeze(-1), delta * A.to(wide).unsqueeze(-1), Bm, Cm, state), x * D.to(wide)[:, None, None]


def reference(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The module's formula, ``chunk_size`` tokens at a time; float64 inputs are computed in float64."""
    *tensors, chunk_size = inputs
    arguments, skip = prepared(*tensors)
    y, states, state = chunk_scan(*arguments, chunk=chunk_size)
    dtype = tensors[0].dtype
    outputs = ((y + skip).transpose(1, 2), states.transpose(1, 2), state)
    return tuple(part.to(dtype).contiguous() for part in outputs)  # type: ignore[return-value]


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but a row of y in which skip and scan happen to cancel is measured by what they have on
    average: the factor of x_t may be rounded to bfloat16.
    """
    if name != "y":
        return state_allowance(anchor)
    arguments, skip = prepared(*(x.double() for x in inputs[:-1]))
    return row_allowance(anchor, scan_scale(*arguments, skip=skip).transpose(1, 2))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; the products of a chunk, multiplied with its masked half."""
    batch, heads, channels, state = (shape[name] for name in ("B", "H", "P", "N"))
    tokens, chunk, states = batch * shape["T"], min(shape["Q"], shape["T"]), batch * (1 + -(-shape["T"] // shape["Q"]))
    moved = tokens * (4 * heads * channels + 4 * state + 2 * heads) + 2 * states * heads * channels * state
    flops = tokens * (2 * chunk * state + heads * channels * (2 * chunk + 4 * state))
    return Cost(moved + 12 * heads, flops, "bf16")
