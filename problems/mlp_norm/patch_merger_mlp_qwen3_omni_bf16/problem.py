"""Vision patch merger (Qwen3-Omni): LayerNorm of every patch, four neighbours joined, two-layer GELU MLP to text width.

There are N patches of C channels; four consecutive patches form one merged row of K = 4 C channels, so there are
M = N / 4 merged rows; the output has O channels.

Inputs, contiguous and row-major:
  x     [N, C]  bfloat16  patches; rows 4 i ... 4 i + 3 belong to merged row i
  ln_w  [C]     bfloat16  LayerNorm weight
  ln_b  [C]     bfloat16  LayerNorm bias
  w1    [K, K]  bfloat16  first weight, [out, in]
  b1    [K]     bfloat16
  w2    [O, K]  bfloat16  second weight, [out, in]
  b2    [O]     bfloat16

Output, contiguous and row-major:
  y     [M, O]  bfloat16

For every row of x, in float32:
  mu = mean(x), var = mean((x - mu)^2)              (over the C channels of this one patch)
  n = bfloat16((x - mu) / sqrt(var + 1e-6) * ln_w + ln_b)
m is n read as [M, K], patch after patch: m[i, p C + c] = n[4 i + p, c] for p = 0 ... 3.
For every row of m:
  h = bfloat16(m @ w1^T + b1)
  a = bfloat16(0.5 * h * (1 + erf(h / sqrt(2))))    (the exact GELU; in float32 inside)
  y = bfloat16(a @ w2^T + b2)

Numerics: LayerNorm statistics are taken around the mean in float32, with the biased variance; n is rounded once.
Products have bfloat16 operands and float32 accumulation, the bias is added in float32, and the sum is rounded once.
Leaving out the rounding of h is within the tolerance.

Rules:
- N is a positive multiple of 4; C and O are multiples of 8. M need not be a multiple of any tile.
- A patch may be constant: then var is 0 and n is ln_b.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, layer_norm, linear

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation

TITLE = "Patch merger: LayerNorm, four patches to one row, GELU MLP"
NUMBER = 27
MODEL = "Qwen3-Omni-30B-A3B"
INPUTS = ("x", "ln_w", "ln_b", "w1", "b1", "w2", "b2")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
MERGED = 4
EPS = 1e-6
WORKLOADS = {
    "full": {"N": 16384, "C": 1152, "O": 2048, "constant_rows": 2},
    "small": {"N": 24, "C": 32, "O": 64, "constant_rows": 1},
    "heldout": [
        {"N": 1332, "C": 1152, "O": 3584},
        {"N": 308, "C": 1024, "O": 2560, "constant_rows": 1},
        {"N": 28, "C": 40, "O": 72, "constant_rows": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    rows, channels, out = shape["N"], shape["C"], shape["O"]
    merged = MERGED * channels
    sizes = ((rows, channels), (channels,), (channels,), (merged, merged), (merged,), (out, merged), (out,))
    return tuple((size, torch.bfloat16) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["N"] // MERGED, shape["O"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal patches, weights that keep their scale, small biases, in ``INPUTS``' order.

    At random places, ``constant_rows`` patches have one value in all channels.
    """
    rows, channels, out = shape["N"], shape["C"], shape["O"]
    merged, bf16 = MERGED * channels, torch.bfloat16
    x = normal(generator, rows, channels, dtype=bf16)
    ln_w = normal(generator, channels, dtype=bf16, scale=0.1, mean=1.0)
    ln_b = normal(generator, channels, dtype=bf16, scale=0.1)
    w1 = normal(generator, merged, merged, dtype=bf16, scale=merged**-0.5)
    b1 = normal(generator, merged, dtype=bf16, scale=0.1)
    w2 = normal(generator, out, merged, dtype=bf16, scale=merged**-0.5)
    b2 = normal(generator, out, dtype=bf16, scale=0.1)
    constant = permutation(generator, rows)[: shape.get("constant_rows", 0)]
    x[constant] = x[constant, :1]
    return x, ln_w, ln_b, w1, b1, w2, b2


def reference(
    x: torch.Tensor,
    ln_w: torch.Tensor,
    ln_b: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
) -> torch.Tensor:
    """The module's formula: torch's operators round their bfloat16 results once, and compute float64 in float64."""
    n = layer_norm(x, x.shape[-1:], ln_w, ln_b, EPS)
    m = n.view(-1, MERGED * x.shape[1])
    return linear(gelu(linear(m, w1, b1)), w2, b2)


def COST(shape: Shape) -> Cost:
    """Patches, weights, biases and output cross memory once; two operations per weight and merged row."""
    rows, channels, out = shape["N"], shape["C"], shape["O"]
    merged = MERGED * channels
    elements = rows * channels + 2 * channels + merged * (merged + 1) + out * (merged + 1) + rows // MERGED * out
    return Cost(bytes=2 * elements, flops=2 * (rows // MERGED) * merged * (merged + out), unit="bf16")
