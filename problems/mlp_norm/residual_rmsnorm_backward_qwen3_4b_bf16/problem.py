"""Gradients of a residual add followed by RMSNorm (Qwen3-4B), with the residual stream's own gradient added.

The forward pass was h = hidden + residual and y = h / sqrt(mean(h^2) + 1e-6) * weight, where both y and h went on to
later layers. T tokens, D channels.

Inputs, contiguous and row-major:
  grad_y         [T, D]  bfloat16  gradient of y
  grad_residual  [T, D]  bfloat16  gradient of h from the layers that used h itself
  h              [T, D]  bfloat16  the saved sum
  weight         [D]     bfloat16

Outputs, a tuple in this order, contiguous and row-major:
  grad_h         [T, D]  bfloat16  whole gradient of h, which is that of either addend
  grad_weight    [D]     bfloat16

For every token t, in float32 and with means over the D channels:
  r = 1 / sqrt(mean(h[t]^2) + 1e-6)
  z[t] = h[t] * r
  q = grad_y[t] * weight
  grad_h[t] = bfloat16(r * (q - z[t] * mean(q * z[t])) + grad_residual[t])
and for every channel d:
  grad_weight[d] = bfloat16(sum over t of grad_y[t, d] * z[t, d])

Numerics: inputs are widened to float32, nothing is rounded in between (z and q are not rounded to bfloat16), and each
output is rounded once, to nearest even. Means and the sum over all tokens are accumulated in float32.

Rules:
- Rows of h may be zero: then r = 1000 and z = 0, so grad_h = 1000 q + grad_residual. They may also be much larger or
  much smaller than the others, so the 1e-6 matters.
- T is any positive number; D is a multiple of 8.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import rms_norm_backward

TITLE = "Backward of residual add + RMSNorm, the residual stream's gradient merged in"
NUMBER = 38
MODEL = "Qwen3-4B"
INPUTS = ("grad_y", "grad_residual", "h", "weight")
OUTPUTS = ("grad_h", "grad_weight")
HOST_VISIBLE = ()
EPS = 1e-6
WORKLOADS = {
    "full": {"T": 16384, "D": 2560, "zero_rows": 2, "large_rows": 4, "small_rows": 4},
    "small": {"T": 9, "D": 160, "zero_rows": 1, "large_rows": 1, "small_rows": 1},
    "heldout": [
        {"T": 1, "D": 2560},
        {"T": 777, "D": 4096, "zero_rows": 2, "large_rows": 5},
        {"T": 67, "D": 328, "zero_rows": 2, "large_rows": 3, "small_rows": 2},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    rows = (shape["T"], shape["D"]), torch.bfloat16
    return rows, rows, rows, ((shape["D"],), torch.bfloat16)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return ((shape["T"], shape["D"]), torch.bfloat16), ((shape["D"],), torch.bfloat16)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal gradients and sums, a weight around 1, in ``INPUTS``' order.

    At random places, ``zero_rows`` rows of h are 0, ``large_rows`` are scaled by 30 and ``small_rows`` by 1e-3.
    """
    tokens, channels = shape["T"], shape["D"]
    grad_y, grad_residual = (normal(generator, tokens, channels, dtype=torch.bfloat16) for _ in range(2))
    h = normal(generator, tokens, channels)
    weight = normal(generator, channels, dtype=torch.bfloat16, scale=0.1, mean=1.0)
    counts = [shape.get(key, 0) for key in ("zero_rows", "large_rows", "small_rows")]
    special = permutation(generator, tokens)[: sum(counts)]
    for factor, chosen in zip((0.0, 30.0, 1e-3), special.split(counts), strict=True):
        h[chosen] *= factor
    return grad_y, grad_residual, h.bfloat16(), weight


def reference(
    grad_y: torch.Tensor, grad_residual: torch.Tensor, h: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    wide = torch.promote_types(h.dtype, torch.float32)
    through_norm, weight_terms = rms_norm_backward(grad_y.to(wide), h.to(wide), weight.to(wide), EPS)
    return (through_norm + grad_residual.to(wide)).to(h.dtype), weight_terms.sum(dim=0).to(weight.dtype)


def COST(shape: Shape) -> Cost:
    """Four tensors of T rows, the weight and its gradient cross memory once; 12 operations per element."""
    tokens, channels = shape["T"], shape["D"]
    return Cost(bytes=2 * channels * (4 * tokens + 2), flops=12 * tokens * channels, unit="fp32")
