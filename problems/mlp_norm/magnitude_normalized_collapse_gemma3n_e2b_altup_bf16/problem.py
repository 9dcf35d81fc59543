"""Collapse of four parallel streams into one (AltUp of Gemma-3n E2B, after the last layer).

Streams 1 to 3 are projected, each row is rescaled to the magnitude of stream 0 at that token, the four are averaged.
B sequences of S tokens, D channels.

Inputs, contiguous and row-major:
  hidden_states  [4, B, S, D]  bfloat16  the streams
  w              [3, D, D]     bfloat16  projections of streams 1, 2, 3; each is [out, in]

Output, contiguous and row-major:
  y              [B, S, D]     bfloat16

For every token, with h_i its row of stream i, and m(r) = bfloat16(mean(bfloat16(r^2))) over the D channels of a row r:
  t = bfloat16(sqrt(m(h_0)))
  for i = 1, 2, 3:
    p_i = bfloat16(w[i - 1] h_i)              (p_i[o] = sum_c w[i - 1, o, c] h_i[c])
    n_i = bfloat16(sqrt(max(m(p_i), e)))      with e = 1.00135803e-05, the bfloat16 next to 1e-5
    c_i = bfloat16(bfloat16(p_i * t) / n_i)
  y = bfloat16((h_0 + c_1 + c_2 + c_3) / 4)

Numerics: products are accumulated in float32, and so are means and the last sum; single operations are computed in
float32 and rounded once to bfloat16, to nearest even, where the formulas say so. Leaving out roundings between the
products and y is within the tolerance.

Rules:
- e is a lower bound of the mean square, not a summand, and only that of the projected streams has it: t has none, so
  where h_0 is zero, y is zero. Tokens whose streams 1 to 3 are so small that the bound holds occur.
- B and S are any positive numbers; D is a multiple of 16.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation

TITLE = "Four streams projected, rescaled to the magnitude of the first and averaged"
NUMBER = 40
MODEL = "Gemma-3n E2B"
INPUTS = ("hidden_states", "w")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
STREAMS = 4
FLOOR = 1.3125 * 2.0**-17
"""The bfloat16 next to 1e-5."""
WORKLOADS = {
    "full": {"B": 2, "S": 4096, "D": 2048, "faint_tokens": 64, "faint_scale": 2.5e-3, "zero_tokens": 2},
    "small": {"B": 2, "S": 3, "D": 64, "faint_tokens": 2, "faint_scale": 2.5e-3, "zero_tokens": 1},
    "heldout": [
        {"B": 1, "S": 1023, "D": 2048},
        {"B": 3, "S": 5, "D": 2048, "faint_tokens": 7, "faint_scale": 1e-3, "zero_tokens": 1},
        {"B": 1, "S": 13, "D": 80, "faint_tokens": 3, "faint_scale": 2.5e-3, "zero_tokens": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    channels = shape["D"]
    return (
        ((STREAMS, shape["B"], shape["S"], channels), torch.bfloat16),
        ((STREAMS - 1, channels, channels), torch.bfloat16),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["S"], shape["D"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal streams, projections of scale 1 / sqrt(D), in ``INPUTS``' order.

    At random tokens, ``faint_tokens`` have streams 1 to 3 scaled by ``faint_scale``, ``zero_tokens`` others a zero
    stream 0.
    """
    batch, length, channels = shape["B"], shape["S"], shape["D"]
    streams = normal(generator, STREAMS, batch * length, channels)
    w = normal(generator, STREAMS - 1, channels, channels, dtype=torch.bfloat16, scale=channels**-0.5)
    counts = [shape.get("faint_tokens", 0), shape.get("zero_tokens", 0)]
    faint, zero = permutation(generator, batch * length)[: sum(counts)].split(counts)
    streams[1:, faint] *= shape.get("faint_scale", 1.0)
    streams[0, zero] = 0.0
    return streams.bfloat16().view(STREAMS, batch, length, channels), w


def reference(hidden_states: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The module's formula, every operation rounded to the inputs' type; float64 inputs are computed in float64."""
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    first = hidden_states[0]
    target = first.square().mean(dim=-1, keepdim=True).sqrt()
    total = first.to(wide)
    for stream, projection in zip(hidden_states[1:], w, strict=True):
        projected = torch.nn.functional.linear(stream, projection)
        magnitude = projected.square().mean(dim=-1, keepdim=True).clamp_min(FLOOR).sqrt()
        total = total + (projected * target / magnitude).to(wide)
    return (total / STREAMS).to(hidden_states.dtype)


def COST(shape: Shape) -> Cost:
    """Streams, projections and output cross memory once; three D x D products per token."""
    tokens, channels = shape["B"] * shape["S"], shape["D"]
    return Cost(
        bytes=2 * (5 * tokens * channels + 3 * channels**2),
        flops=6 * tokens * channels**2,
        unit="bf16",
    )
