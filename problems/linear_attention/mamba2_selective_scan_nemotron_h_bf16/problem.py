"""Mamba-2 selective scan from a carried-in state, with the skip of the inputs (Nemotron-H mixer, prefill).

B sequences of T tokens, H heads of P channels, G groups (H is a multiple of G) of state width N.

Inputs, contiguous and row-major:
  x        [B, T, H, P]  bfloat16
  dt       [B, T, H]     bfloat16  time steps before bias and softplus
  A_log    [H]           float32   logarithm of the decay rate
  Bm       [B, T, G, N]  bfloat16  how a token enters the state
  Cm       [B, T, G, N]  bfloat16  how the state is read
  D        [H]           float32   factor of the skip
  dt_bias  [H]           float32
  h0       [B, H, P, N]  float32   state before the first token

Outputs, a tuple in this order, contiguous and row-major:
  y            [B, T, H, P]  bfloat16
  final_state  [B, H, P, N]  bfloat16

Head h uses group h // (H / G) of Bm and Cm. For sequence b and head h the state S is a P x N matrix, h0[b, h] at first,
and for t = 0, 1, ..., T - 1, with x_t, B_t, C_t those of token t:
  delta = softplus(dt[b, t, h] + dt_bias[h])        softplus(z) = log(1 + exp(z))
  S = exp(-exp(A_log[h]) delta) S + delta outer(x_t, B_t)
  y[b, t, h] = bfloat16(S C_t + D[h] x_t)
and final_state[b, h] = bfloat16(S) after the last token.

Numerics: inputs are widened exactly; the recurrence runs in float32 and both outputs are rounded once, to nearest even.
delta is not clamped, and positive however negative its argument. Any order of evaluation that equals the recurrence is
allowed, tokens taken in groups included, and so are products of operands rounded to bfloat16 with sums in float32; the
state that is carried from token to token, or from group to group, stays float32.

Rules:
- The skip takes x_t itself, not delta x_t.
- The first token's decay already acts on h0.
- dt + dt_bias may exceed 90: the decay is then 0 in float32 in some heads. It may be below -17, and x_t then so large
  (1e9) that delta x_t counts although delta is below 1e-7.
- B and T are any positive numbers, T need not be a multiple of anything.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import softplus

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.linear_attention.common import (
    chunk_scan,
    log_uniform,
    row_allowance,
    scan_scale,
    state_allowance,
    step_bias,
)

TITLE = "Mamba-2 selective scan with carried-in state and skip, 128 heads of 64, 8 groups"
NUMBER = 63
MODEL = "Nemotron-H-8B"
INPUTS = ("x", "dt", "A_log", "Bm", "Cm", "D", "dt_bias", "h0")
OUTPUTS = ("y", "final_state")
HOST_VISIBLE = ()
WIDTHS = {"H": 128, "P": 64, "G": 8, "N": 128}
WORKLOADS = {
    "full": {"B": 1, "T": 4096, **WIDTHS, "special_tokens": 3},
    "small": {"B": 1, "T": 150, "H": 4, "P": 16, "G": 2, "N": 16, "special_tokens": 2},
    "heldout": [
        {"B": 3, "T": 777, **WIDTHS, "special_tokens": 2},
        {"B": 4, "T": 1, **WIDTHS},
        {"B": 2, "T": 33, "H": 6, "P": 16, "G": 3, "N": 32, "special_tokens": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, heads, per_head = (shape["B"], shape["T"]), shape["H"], ((shape["H"],), torch.float32)
    entry = (*tokens, shape["G"], shape["N"]), torch.bfloat16
    return (
        ((*tokens, heads, shape["P"]), torch.bfloat16),
        ((*tokens, heads), torch.bfloat16),
        per_head,
        entry,
        entry,
        per_head,
        per_head,
        ((shape["B"], heads, shape["P"], shape["N"]), torch.float32),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    batch, heads, channels = shape["B"], shape["H"], shape["P"]
    y, state = (batch, shape["T"], heads, channels), (batch, heads, channels, shape["N"])
    return (y, torch.bfloat16), (state, torch.bfloat16)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal sequences, rates and steps as the model starts with, a small state, in ``INPUTS``' order.

    At random places, ``special_tokens`` tokens each have dt = -16 and a large x, dt = 100 and a small x, or such a dt
    that delta is about 2.3, in all heads.
    """
    tokens, heads, channels, state = (shape["B"], shape["T"]), shape["H"], shape["P"], shape["N"]
    x = normal(generator, *tokens, heads, channels, dtype=torch.bfloat16)
    dt = normal(generator, *tokens, heads, dtype=torch.bfloat16)
    A_log = log_uniform(generator, heads, low=1.0, high=16.0).log()
    Bm, Cm = (normal(generator, *tokens, shape["G"], state, dtype=torch.bfloat16) for _ in range(2))
    D = normal(generator, heads, scale=0.1, mean=1.0)
    h0 = normal(generator, shape["B"], heads, channels, state, scale=0.2)
    count = shape.get("special_tokens", 0)
    dt_bias = step_bias(generator, heads)
    small, large, middle = permutation(generator, shape["B"] * shape["T"])[: 3 * count].view(3, count)
    steps, rows = dt.flatten(0, 1), x.flatten(0, 1)
    steps[small], steps[large], steps[middle] = -16, 100, (2.2 - dt_bias).bfloat16()
    rows[small] *= 2.0**28
    rows[large] *= 2.0**-6
    return x, dt, A_log, Bm, Cm, D, dt_bias, h0


def prepared(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    Bm: torch.Tensor,
    Cm: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    h0: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The scan's arguments, head first, its state the last of them, and the skip."""
    wide = torch.promote_types(x.dtype, torch.float32)
    delta = softplus(dt.to(wide) + dt_bias.to(wide)).transpose(1, 2)
    x, Bm, Cm = (part.to(wide).transpose(1, 2) for part in (x, Bm, Cm))
    alpha = -delta * A_log.to(wide).exp().unsqueeze(-1)
    return (x * delta.unsqueeze(-1), alpha, Bm, Cm, h0.to(wide)), x * D.to(wide)[:, None, None]


def reference(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula, 128 tokens at a time; float64 inputs are computed in float64."""
    arguments, skip = prepared(*inputs)
    y, _, state = chunk_scan(*arguments, chunk=128)
    dtype = inputs[0].dtype
    return (y + skip).transpose(1, 2).to(dtype).contiguous(), state.to(dtype)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """The general rule, but a row of y in which skip and scan happen to cancel is measured by what they have on
    average: the factor of x_t may be rounded to bfloat16.
    """
    if name == "final_state":
        return state_allowance(anchor)
    arguments, skip = prepared(*(x.double() for x in inputs))
    return row_allowance(anchor, scan_scale(*arguments, skip=skip).transpose(1, 2))


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; operations of a form that takes 128 tokens at a time."""
    batch, heads, channels, groups, state = (shape[name] for name in ("B", "H", "P", "G", "N"))
    tokens, chunk = batch * shape["T"], min(128, shape["T"])
    moved = tokens * (4 * heads * channels + 4 * groups * state + 2 * heads) + 6 * batch * heads * channels * state
    flops = tokens * (2 * chunk * state * groups + heads * channels * (2 * chunk + 4 * state))
    return Cost(moved + 12 * heads, flops, "bf16")
