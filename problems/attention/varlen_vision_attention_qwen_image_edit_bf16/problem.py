"""Rotary embedding and segment-wise bidirectional attention of a vision tower (Qwen2.5-VL in Qwen-Image-Edit).

There are T tokens (patches of several images, one image after another), cut into S segments of consecutive tokens, 16
heads and 80 channels per head.

Inputs, contiguous and row-major:
  qkv         [T, 3, 16, 80]  bfloat16  projected tokens: index 0 queries, 1 keys, 2 values
  cos         [T, 80]         float32   rotary cosines by token; channels d and d + 40 have the same
  sin         [T, 80]         float32   rotary sines, likewise
  cu_seqlens  [S + 1]         int32     0 = cu_seqlens[0] <= ... <= cu_seqlens[S] = T; segment s is the tokens
                                        cu_seqlens[s] ... cu_seqlens[s + 1] - 1
  scale       float                     factor of the logits

Output, contiguous and row-major:
  out         [T, 1280]       bfloat16  channel 80 h + d is head h's channel d

1. Queries and keys are rotated in float32 and rounded to bfloat16; values stay. Per token and head:
     y[d]      = x[d] cos[d] - x[d + 40] sin[d]              for d < 40
     y[d + 40] = x[d + 40] cos[d + 40] + x[d] sin[d + 40]
2. For every segment, every head and every token i of the segment, over the tokens j of the same segment:
     l_ij = dot(q_i, k_j) * scale
     out[i, head] = sum_j softmax(l_i)_j v_j, rounded once to bfloat16

Numerics: dot products of the rounded queries and keys, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- Every token sees all tokens of its segment, before and after it, and none of another segment.
- Segments have any length from 0 on, in any order; a segment of length 0 contributes nothing. Together they cover all
  tokens, so every row of out is written.
- cu_seqlens is fixed by the workload and its values are visible to host code.
- The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.attention.common import half_turn, rotary_frequencies, softmax_allowance
from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, offsets

TITLE = "Rotary embedding and attention within segments, head_dim 80"
NUMBER = 11
MODEL = "Qwen-Image-Edit (Qwen2.5-VL vision tower)"
INPUTS = ("qkv", "cos", "sin", "cu_seqlens", "scale")
OUTPUTS = ("out",)
HOST_VISIBLE = ("cu_seqlens",)
HEADS, HEAD_DIM, THETA, WINDOW = 16, 80, 10000.0, 8
SCALE = HEAD_DIM**-0.5
# Images as [rows, columns] of patches. Segments are windows of 8 x 8 patches, unless "lengths" gives them.
WORKLOADS = {
    "full": {"images": [[74, 74], [52, 94], [8, 8]]},
    "small": {"images": [[6, 6]], "lengths": [16, 4, 0, 16]},
    "heldout": [
        {"images": [[28, 28], [36, 52], [1, 1]], "lengths": [28 * 28, 36 * 52, 1]},
        {"images": [[32, 48]]},
        {"images": [[10, 4], [2, 2]]},
    ],
}


def segments(shape: Shape) -> list[int]:
    """Tokens of every segment. A last row or column of windows is there even if no patch is left for it."""
    if "lengths" in shape:
        return shape["lengths"]
    grids = [[[min(WINDOW, n - i) for i in range(0, n + 1, WINDOW)] for n in image] for image in shape["images"]]
    return [height * width for heights, widths in grids for height in heights for width in widths]


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each segment begins."""
    return {"cu_seqlens": offsets(segments(shape))}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    lengths = segments(shape)
    angles = (sum(lengths), HEAD_DIM), torch.float32
    return (
        ((sum(lengths), 3, HEADS, HEAD_DIM), torch.bfloat16),
        angles,
        angles,
        ((len(lengths) + 1,), torch.int32),
        SCALE,
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((sum(segments(shape)), HEADS * HEAD_DIM), torch.bfloat16),)


def positions(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """(row, column) of an image's tokens [rows * columns, 2]: by window, in it by 2 x 2 block, in that by row."""
    grid = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
    r, c = grid.unbind(-1)
    order = torch.zeros_like(r)
    for part in (r // WINDOW, c // WINDOW, r // 2 % 4, c // 2 % 4, r % 2, c % 2):
        order = order * 256 + part
    return grid[order.argsort()]


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Standard normal projections and the images' angles: 20 frequencies by row, then 20 by column."""
    cu_seqlens = torch.tensor(geometry(shape)["cu_seqlens"], dtype=torch.int32, device=generator.device)
    qkv = normal(generator, sum(segments(shape)), 3, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    places = torch.cat([positions(rows, columns, generator.device) for rows, columns in shape["images"]])
    frequencies = rotary_frequencies(HEAD_DIM // 2, THETA, generator.device)
    angles = (places[..., None] * frequencies).flatten(1).repeat(1, 2)
    return qkv, angles.cos().float(), angles.sin().float(), cu_seqlens, SCALE


def rotated(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries and keys [T, 2, 16, 80] after the rotation, not yet rounded."""
    x = qkv[:, :2]
    return x * cos[:, None, None] + half_turn(x) * sin[:, None, None]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention within each segment, those of one length at once; in the inputs' type, [T, 16, 80]."""
    out, starts = torch.empty_like(v), defaultdict(list)
    for begin, end in pairwise(cu_seqlens.tolist()):
        starts[end - begin].append(begin)
    for length, begins in starts.items():
        rows = torch.tensor(begins, device=q.device)[:, None] + torch.arange(length, device=q.device)
        queries, keys, values = (x[rows].transpose(1, 2) for x in (q, k, v))
        weights = (queries @ keys.mT * scale).softmax(dim=-1)
        out[rows] = (weights @ values).transpose(1, 2)
    return out


def reference(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64, without rounding."""
    wide = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    q, k = rotated(wide, cos, sin).to(qkv.dtype).to(wide.dtype).unbind(1)
    return attend(q, k, wide[:, 2], cu_seqlens, scale).flatten(1).to(qkv.dtype)


def anchor(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same in float64 on rotated queries and keys that are rounded to bfloat16, as the definition says."""
    q, k = rotated(qkv.double(), cos.double(), sin.double()).bfloat16().double().unbind(1)
    return attend(q, k, qkv[:, 2].double(), cu_seqlens, scale).flatten(1)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Allowed absolute error: 1.6e-2 (|x| + rms of x over its head), which admits probabilities in bfloat16."""
    return softmax_allowance("output", inputs, reference, anchor.unflatten(1, (HEADS, HEAD_DIM))).flatten(1)


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; two multiply-adds per channel and pair of tokens of a segment."""
    lengths = segments(shape)
    tokens, channels = sum(lengths), HEADS * HEAD_DIM
    moved = tokens * (2 * 3 * channels + 2 * channels + 2 * 4 * HEAD_DIM) + 4 * (len(lengths) + 1)
    return Cost(bytes=moved, flops=4 * channels * sum(length * length for length in lengths), unit="bf16")
