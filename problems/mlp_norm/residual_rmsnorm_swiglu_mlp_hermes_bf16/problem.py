"""Second half of a decoder layer: residual add, RMSNorm, SwiGLU MLP, residual add (Hermes-3-Llama-3.1-8B).

There are B sequences of S tokens, width D, hidden width F.

Inputs, contiguous and row-major:
  hidden_states  [B, S, D]  bfloat16  output of the attention
  residual       [B, S, D]  bfloat16  what entered the layer
  norm_weight    [D]        bfloat16
  w_gate         [F, D]     bfloat16  [out, in]
  w_up           [F, D]     bfloat16  [out, in]
  w_down         [D, F]     bfloat16  [out, in]

Output, contiguous and row-major:
  out            [B, S, D]  bfloat16

For every token, where bf16 rounds to bfloat16 and everything inside is float32:
  r = bf16(hidden_states + residual)
  n = bf16(norm_weight * bf16(r / sqrt(mean(r^2) + 1e-5)))
  g = bf16(n @ w_gate^T)
  u = bf16(n @ w_up^T)
  m = bf16(bf16(g * sigmoid(g)) * u)
  d = bf16(m @ w_down^T)
  out = bf16(r + d)

Numerics: products have bfloat16 operands and float32 accumulation; the mean runs over the D columns in float32. Fewer
roundings than written (r, g, u, the products' results or the sum kept in float32) are within the tolerance.

Rules:
- The last sum takes r, not hidden_states or residual alone.
- A token may have residual = -hidden_states: then r = 0 and out is exactly 0. Tokens may be so small that the 1e-5
  matters.
- There are no biases. D and F are multiples of 8; B and S are any positive numbers.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import llama_rms_norm

TITLE = "Residual add, RMSNorm, SwiGLU MLP, residual add"
NUMBER = 33
MODEL = "Hermes-3-Llama-3.1-8B"
INPUTS = ("hidden_states", "residual", "norm_weight", "w_gate", "w_up", "w_down")
OUTPUTS = ("out",)
HOST_VISIBLE = ()
EPS = 1e-5
EDGES = {"cancelling_tokens": 1, "small_tokens": 1}
WORKLOADS = {
    "full": {"B": 1, "S": 2048, "D": 4096, "F": 14336, **EDGES},
    "small": {"B": 2, "S": 3, "D": 96, "F": 256, **EDGES},
    "heldout": [
        {"B": 3, "S": 111, "D": 4096, "F": 14336},
        {"B": 1, "S": 65, "D": 5120, "F": 17408, **EDGES},
        {"B": 1, "S": 7, "D": 72, "F": 168, **EDGES},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    width, hidden = shape["D"], shape["F"]
    tokens = (shape["B"], shape["S"], width)
    sizes = (tokens, tokens, (width,), (hidden, width), (hidden, width), (width, hidden))
    return tuple((size, torch.bfloat16) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["S"], shape["D"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal tokens, a norm weight around 1, weights that keep their scale, in ``INPUTS``' order.

    At random places, ``cancelling_tokens`` tokens have residual = -hidden_states, and ``small_tokens`` tokens are
    scaled by 1e-3 in both tensors.
    """
    width, hidden, bf16 = shape["D"], shape["F"], torch.bfloat16
    hidden_states, residual = (normal(generator, shape["B"], shape["S"], width) for _ in range(2))
    norm_weight = normal(generator, width, dtype=bf16, scale=0.1, mean=1.0)
    w_gate, w_up = (normal(generator, hidden, width, dtype=bf16, scale=width**-0.5) for _ in range(2))
    w_down = normal(generator, width, hidden, dtype=bf16, scale=hidden**-0.5)
    added, kept = (tensor.view(-1, width) for tensor in (hidden_states, residual))
    counts = [shape.get(key, 0) for key in EDGES]
    cancelling, small = permutation(generator, len(added))[: sum(counts)].split(counts)
    kept[cancelling] = -added[cancelling]
    for tensor in (added, kept):
        tensor[small] *= 1e-3
    return hidden_states.to(bf16), residual.to(bf16), norm_weight, w_gate, w_up, w_down


def reference(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """The module's formula: torch's operators round their bfloat16 results once, and compute float64 in float64."""
    r = hidden_states + residual
    n = llama_rms_norm(r, norm_weight, EPS)
    return r + linear(silu(linear(n, w_gate)) * linear(n, w_up), w_down)


def COST(shape: Shape) -> Cost:
    """Tokens, weights and output cross memory once; two operations per matrix element and token."""
    tokens, width, hidden = shape["B"] * shape["S"], shape["D"], shape["F"]
    elements = 3 * tokens * width + 3 * width * hidden + width
    return Cost(bytes=2 * elements, flops=6 * tokens * width * hidden, unit="bf16")
