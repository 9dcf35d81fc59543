"""Dispatch of tokens to experts of limited capacity: softmax top-k routing, rows copied into a buffer per expert.

There are T tokens of H channels, E experts, k choices per token, and C places per expert (Qwen3-Coder-480B-A35B has
H = 6144, E = 160, k = 8).

Inputs, contiguous and row-major:
  hidden         [T, H]     bfloat16
  router_logits  [T, E]     float32
  top_k          int        k, at most E
  capacity       int        C, at least 1

Outputs, a tuple in this order, contiguous and row-major:
  buffer         [E, C, H]  bfloat16   rows of the tokens that each expert accepted
  combine_w      [T, k]     float32    weight of choice j of token t, 0 if it was dropped
  slot           [T, k]     int32      where its row is: expert * C + place, -1 if it was dropped
  counts         [E]        int32      choices of each expert, dropped ones included

For token t, choice j = 0, ..., k - 1 is the expert of the (j + 1)-th largest logit; choice 0 is the best. In float32:
  p = softmax(router_logits[t])                 over all E experts
  w_j = p of choice j / (sum of p over the k choices)

Choices queue for their experts in this order: choice 0 of all tokens in the order of t, then choice 1 of all tokens in
the order of t, and so on. With n = number of earlier queue entries that name the same expert e:
  n < C:   slot[t, j] = e * C + n,  combine_w[t, j] = w_j,  buffer[e, n] = hidden[t]
  n >= C:  slot[t, j] = -1,         combine_w[t, j] = 0     (the other weights of t stay as they are)

Numerics: hidden is copied bit by bit. The weights are computed in float32, from differences to the largest logit.

Rules:
- Rows of buffer that were given to no choice are 0.
- On equal logits the lower expert comes first. No choice and no order of choices hangs on rounding: neighbours among
  the k + 1 largest logits of a token differ by at least 1e-4.
- T * k need not be a multiple of anything; T may be 1. Some experts may have no token, others far more than C.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, redraw
from mkb_env.problems.moe.common import best, gaps, large_normal, per_expert

TITLE = "Top-8 routing with a capacity limit and dispatch to 160 experts"
NUMBER = 45
MODEL = "Qwen3-Coder-480B-A35B"
INPUTS = ("hidden", "router_logits", "top_k", "capacity")
OUTPUTS = ("buffer", "combine_w", "slot", "counts")
HOST_VISIBLE = ()
MARGIN = 1e-4
SIZES = {"H": 6144, "E": 160, "k": 8}
WORKLOADS = {
    "full": SIZES | {"T": 4096, "C": 256, "shifts": [[[7], 1.0], [[100], -9.0]]},
    "small": {"T": 16, "H": 32, "E": 8, "k": 2, "C": 4, "shifts": [[[1], 1.0], [[5], -9.0]]},
    "heldout": [
        SIZES | {"T": 1000, "C": 63, "shifts": [[[3, 20, 41, 64, 77, 101, 130, 159], 3.0]]},
        SIZES | {"T": 1, "C": 1, "shifts": []},
        {"T": 37, "H": 48, "E": 11, "k": 3, "C": 9, "shifts": [[[2], 2.0]]},
    ],
}
"""``shifts``: what is added to the logits of some experts, so that some overflow and some stay empty."""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    return (
        ((shape["T"], shape["H"]), torch.bfloat16),
        ((shape["T"], shape["E"]), torch.float32),
        shape["k"],
        shape["C"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    choices = shape["T"], shape["k"]
    return (
        ((shape["E"], shape["C"], shape["H"]), torch.bfloat16),
        (choices, torch.float32),
        (choices, torch.int32),
        ((shape["E"],), torch.int32),
    )


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal rows and logits, in ``INPUTS``' order; logits without a clear order of choices are redrawn."""
    hidden = large_normal(generator, shape["T"], shape["H"], scale=1.0)
    shifts = per_expert(shape["E"], shape["shifts"], generator.device)
    logits = redraw(
        lambda rows: normal(generator, rows, shape["E"]) + shifts,
        lambda drawn: gaps(drawn.double(), shape["k"]).amin(dim=-1) >= MARGIN,
        shape["T"],
    )
    return hidden, logits, shape["k"], shape["C"]


def accept(chosen: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the choices [T, k] (-1: dropped) and how often each expert is chosen."""
    queue = chosen.T.flatten()
    asked = torch.arange(experts, device=queue.device).unsqueeze(1) == queue
    place = (asked.cumsum(dim=1) - 1).gather(0, queue.unsqueeze(0)).squeeze(0)
    slot = torch.where(place < capacity, queue * capacity + place, -1)
    return slot.view(chosen.T.shape).T, asked.sum(dim=1)


def dispatch(hidden: torch.Tensor, slot: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows of ``hidden`` at their slots, [rows, H]; the others 0."""
    buffer = hidden.new_zeros(rows, hidden.shape[1])
    token, choice = (slot >= 0).nonzero(as_tuple=True)
    buffer[slot[token, choice]] = hidden[token]
    return buffer


def reference(
    hidden: torch.Tensor, router_logits: torch.Tensor, top_k: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    experts = router_logits.shape[1]
    chosen = best(router_logits, top_k)
    p = router_logits.softmax(dim=-1).gather(-1, chosen)
    slot, counts = accept(chosen, experts, capacity)
    combine_w = torch.where(slot >= 0, p / p.sum(dim=-1, keepdim=True), 0.0)
    buffer = dispatch(hidden, slot, experts * capacity).view(experts, capacity, -1)
    return buffer, combine_w.contiguous(), slot.int().contiguous(), counts.int()


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor | None:
    """``buffer`` is exact. ``combine_w`` may err by 4e-6 of each weight: two exponentials as the hardware approximates
    them (2^-22 each), their arguments of up to 10 scaled to base 2 in float32 (2^-24 of 14 each), a sum and a quotient.
    """
    if name == "buffer":
        return anchor.new_zeros(())
    return 4e-6 * anchor.abs() if name == "combine_w" else None


def COST(shape: Shape) -> Cost:
    """Every row and logit read once, all outputs written once; three operations per logit."""
    tokens, hidden, experts, k = (shape[key] for key in ("T", "H", "E", "k"))
    written = 2 * experts * shape["C"] * hidden + 8 * tokens * k + 4 * experts
    return Cost(bytes=written + 2 * tokens * hidden + 4 * tokens * experts, flops=3 * tokens * experts, unit="fp32")
