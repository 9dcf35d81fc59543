"""SwiGLU feed-forward with the sizes of a speech encoder (Parakeet): gate and up projection, SiLU, down projection.

There are B utterances of T frames, width D, hidden width F.

Inputs, contiguous and row-major:
  x       [B, T, D]  float32
  w_gate  [F, D]     float32  [out, in]
  w_up    [F, D]     float32  [out, in]
  w_down  [D, F]     float32  [out, in]

Output, contiguous and row-major:
  y       [B, T, D]  float32

For every frame:
  g = x @ w_gate^T
  u = x @ w_up^T
  a = g * sigmoid(g) * u
  y = a @ w_down^T

Numerics: everything is float32. Operands of the three products may be rounded to TF32 (to nearest) if sums are
accumulated in float32; truncating them to TF32, or rounding them to bfloat16, is too coarse. Elements of g may be
several hundred in magnitude, of either sign: a tends to 0 where g is very negative, and must not become NaN.

Rules:
- There are no biases.
- D and F are multiples of 4; B and T are any positive numbers.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation
from mkb_env.problems.mlp_norm.common import fp32_gemm_allowance

TITLE = "SwiGLU feed-forward"
NUMBER = 32
MODEL = "Parakeet"
INPUTS = ("x", "w_gate", "w_up", "w_down")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"B": 16, "T": 500, "D": 1024, "F": 4096, "large_frames": 2},
    "small": {"B": 2, "T": 6, "D": 64, "F": 160, "large_frames": 1},
    "heldout": [
        {"B": 1, "T": 187, "D": 1024, "F": 4096},
        {"B": 3, "T": 41, "D": 512, "F": 2048, "large_frames": 1},
        {"B": 1, "T": 13, "D": 76, "F": 164, "large_frames": 1},
    ],
}
allowance = fp32_gemm_allowance


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    width, hidden = shape["D"], shape["F"]
    sizes = ((shape["B"], shape["T"], width), (hidden, width), (hidden, width), (width, hidden))
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["T"], shape["D"]), torch.float32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal frames and weights that keep their scale, in ``INPUTS``' order.

    At random places, ``large_frames`` frames are scaled by 100.
    """
    width, hidden = shape["D"], shape["F"]
    x = normal(generator, shape["B"], shape["T"], width)
    w_gate, w_up = (normal(generator, hidden, width, scale=width**-0.5) for _ in range(2))
    w_down = normal(generator, width, hidden, scale=hidden**-0.5)
    frames = x.view(-1, width)
    frames[permutation(generator, len(frames))[: shape.get("large_frames", 0)]] *= 100
    return x, w_gate, w_up, w_down


def reference(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    return linear(silu(linear(x, w_gate)) * linear(x, w_up), w_down)


def COST(shape: Shape) -> Cost:
    """Frames, weights and output cross memory once; two operations per weight and frame."""
    frames, width, hidden = shape["B"] * shape["T"], shape["D"], shape["F"]
    return Cost(bytes=4 * (2 * frames * width + 3 * width * hidden), flops=6 * frames * width * hidden, unit="tf32")
