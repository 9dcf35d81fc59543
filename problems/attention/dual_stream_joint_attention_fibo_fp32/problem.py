"""Joint attention of a text and an image stream with q/k RMSNorm per stream and rotary embedding (FIBO, Flux-like).

There are B items with St text tokens (of which the first txt_len are real, the others padding) and Si image tokens, N
heads and D channels per head, D even. The joint sequence is the text, then the image: S = St + Si tokens.

Inputs, contiguous and row-major:
  q_img    [B, Si, N, D]  float32  projected image queries
  k_img    [B, Si, N, D]  float32  projected image keys
  v_img    [B, Si, N, D]  float32  projected image values
  q_txt    [B, St, N, D]  float32  projected text queries
  k_txt    [B, St, N, D]  float32  projected text keys
  v_txt    [B, St, N, D]  float32  projected text values
  wq_img   [D]            float32  norm weight of image queries
  wk_img   [D]            float32  norm weight of image keys
  wq_txt   [D]            float32  norm weight of text queries
  wk_txt   [D]            float32  norm weight of text keys
  cos      [S, D]         float32  rotary cosines by joint position; channels 2i and 2i + 1 have the same
  sin      [S, D]         float32  rotary sines, likewise
  txt_len  [B]            int32    0 <= txt_len <= St
  eps      float                   of the norms

Outputs, a tuple in this order, contiguous and row-major:
  out_img  [B, Si, N D]   float32  channel D n + d is head n's channel d
  out_txt  [B, St, N D]   float32  likewise

1. For every token and head, each stream with its own weights: x -> x / sqrt(mean(x^2) + eps) * w, the mean over the D
   channels. Queries and keys only; values stay.
2. Text and image are concatenated, text first.
3. Queries and keys are rotated in adjacent pairs of channels, by the token's joint position:
     y[2i]     = x[2i] cos[2i] - x[2i + 1] sin[2i]
     y[2i + 1] = x[2i + 1] cos[2i + 1] + x[2i] sin[2i + 1]
4. For every item b, head n and joint position i, over the visible positions j (all image tokens and the text tokens
   j < txt_len[b]):
     l_j = dot(q_i, k_j) / sqrt(D);  o_i = sum_j softmax(l)_j v_j
5. o is 0 for the padded text positions txt_len[b] <= i < St.
6. o[:St] is out_txt, o[St:] is out_img.

Numerics: everything is in float32 and accumulated in float32. Products of tensor cores with operands rounded to TF32
are within the tolerance.

Rules:
- There is no causal mask. Si > 0, so some key is always visible; txt_len may be 0 and may be St.
- St, Si and txt_len are multiples of nothing.
- Text tokens are rotated as image tokens are, by angles of their own, which are not 0.
- Some queries and keys of either stream are as small as 1e-3, where eps counts.
- txt_len is fixed by the workload and its values are visible to host code.
- The inputs are not changed; every output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.attention.common import inverse_rms, rotary_frequencies, tf32_allowance
from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal

TITLE = "Joint text-image attention with q/k norm per stream and rotary embedding"
NUMBER = 13
MODEL = "Bria FIBO"
INPUTS = (
    "q_img", "k_img", "v_img", "q_txt", "k_txt", "v_txt", "wq_img", "wk_img", "wq_txt", "wk_txt", "cos", "sin",
    "txt_len", "eps",
)  # fmt: skip
OUTPUTS = ("out_img", "out_txt")
HOST_VISIBLE = ("txt_len",)
EPS, THETA, QUIET = 1e-6, 10000.0, 1e-3
HEADS_AT_ONCE = 8
# "grid": rows and columns of image tokens. "axes": channels rotated by (index, row, column); they add up to D. "quiet":
# so many first tokens of either stream have queries and keys of 1e-3.
WORKLOADS = {
    "full": {"N": 24, "axes": [16, 56, 56], "grid": [48, 48], "St": 512, "txt_len": [512, 187, 0], "quiet": 5},
    "small": {"N": 2, "axes": [16, 56, 56], "grid": [3, 4], "St": 7, "txt_len": [7, 3, 0], "quiet": 2},
    "heldout": [
        {"N": 24, "axes": [16, 56, 56], "grid": [25, 40], "St": 77, "txt_len": [77]},
        {"N": 5, "axes": [8, 28, 28], "grid": [9, 37], "St": 130, "txt_len": [130, 1, 0]},
        {"N": 3, "axes": [4, 12, 8], "grid": [5, 5], "St": 11, "txt_len": [10, 0], "quiet": 3},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """How many text tokens of each item are real."""
    return {"txt_len": shape["txt_len"]}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    batch, heads, dim, (rows, columns) = len(shape["txt_len"]), shape["N"], sum(shape["axes"]), shape["grid"]
    image, text = ((batch, count, heads, dim) for count in (rows * columns, shape["St"]))
    angles = image[1] + text[1], dim
    sizes = *[image] * 3, *[text] * 3, *[(dim,)] * 4, angles, angles
    return *((size, torch.float32) for size in sizes), ((batch,), torch.int32), EPS


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    specs = input_specs(shape)
    return tuple(((batch, count, heads * dim), dtype) for (batch, count, heads, dim), dtype in (specs[0], specs[3]))


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Standard normal projections, norm weights of 1.5 and deviation 0.2, angles of the text's indices from 1 on and of
    the image's rows and columns.
    """
    specs = input_specs(shape)
    projected = [normal(generator, *size) for size, _ in specs[:6]]
    for at in (0, 1, 3, 4):
        projected[at][:, : shape.get("quiet", 0)] *= QUIET
    weights = [normal(generator, *size, scale=0.2, mean=1.5) for size, _ in specs[6:10]]
    indices = (torch.arange(size, device=generator.device) for size in (1, *shape["grid"]))
    places = torch.zeros(shape["St"], 3, dtype=torch.int64, device=generator.device)
    places[:, 0] = torch.arange(1, shape["St"] + 1, device=generator.device)
    places = torch.cat((places, torch.cartesian_prod(*indices)))
    turns = [
        torch.outer(place, rotary_frequencies(width, THETA, generator.device))
        for place, width in zip(places.double().unbind(-1), shape["axes"], strict=True)
    ]
    angles = torch.cat(turns, dim=-1).repeat_interleave(2, dim=-1)
    txt_len = torch.tensor(shape["txt_len"], dtype=torch.int32, device=generator.device)
    return *projected, *weights, angles.cos().float(), angles.sin().float(), txt_len, EPS


def joint(
    image: torch.Tensor,
    text: torch.Tensor,
    image_weight: torch.Tensor,
    text_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Queries or keys of both streams, normalised, weighted and rotated, [B, S, N, D]."""
    streams = ((text, text_weight), (image, image_weight))
    x = torch.cat([stream * inverse_rms(stream, eps) * weight for stream, weight in streams], dim=1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos[:, None] + torch.stack((-odd, even), dim=-1).flatten(-2) * sin[:, None]


def reference(
    q_img: torch.Tensor,
    k_img: torch.Tensor,
    v_img: torch.Tensor,
    q_txt: torch.Tensor,
    k_txt: torch.Tensor,
    v_txt: torch.Tensor,
    wq_img: torch.Tensor,
    wk_img: torch.Tensor,
    wq_txt: torch.Tensor,
    wk_txt: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    txt_len: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula on the dense joint sequence, some heads of an item at a time, in the inputs' type."""
    text = q_txt.shape[1]
    q = joint(q_img, q_txt, wq_img, wq_txt, cos, sin, eps)
    k = joint(k_img, k_txt, wk_img, wk_txt, cos, sin, eps)
    v = torch.cat((v_txt, v_img), dim=1)
    positions = torch.arange(q.shape[1], device=q.device)
    padding = (positions < text) & (positions >= txt_len[:, None])
    out = torch.empty_like(q)
    for b in range(len(q)):
        for head in range(0, q.shape[2], HEADS_AT_ONCE):
            heads = slice(head, head + HEADS_AT_ONCE)
            logits = torch.einsum("ind,jnd->nij", q[b, :, heads], k[b, :, heads]).mul_(q.shape[-1] ** -0.5)
            p = logits.masked_fill_(padding[b], -torch.inf).softmax(dim=-1)
            out[b, :, heads] = torch.einsum("nij,jnd->ind", p, v[b, :, heads])
    out.masked_fill_(padding[..., None, None], 0.0)
    image, words = (
        part.flatten(2).clone(memory_format=torch.contiguous_format) for part in (out[:, text:], out[:, :text])
    )
    return image, words


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """1e-2 of each output's size for nearly all elements, which admits TF32; 0 for padded text."""
    return tf32_allowance(anchor, zeros=True)


def COST(shape: Shape) -> Cost:
    """Image and real text tokens are read once, all outputs written once; two products over the visible pairs."""
    specs, lengths = input_specs(shape), shape["txt_len"]
    (batch, image, heads, dim), text = specs[0][0], shape["St"]
    read = 3 * (batch * image + sum(lengths)) * heads * dim + 2 * (text + image) * dim + 4 * dim + batch
    written = batch * (text + image) * heads * dim
    pairs = heads * sum((image + length) ** 2 for length in lengths)
    return Cost(bytes=4 * (read + written), flops=4 * dim * pairs, unit="tf32")
