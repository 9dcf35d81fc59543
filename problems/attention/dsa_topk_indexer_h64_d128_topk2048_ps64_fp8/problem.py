"""Top-k token selection by fp8 scores over a paged key cache (the lightning indexer of DeepSeek-V3.2).

There are B requests with one query token each, 64 heads of 128 channels, P cache pages of 64 tokens, and at most W
pages per request.

Inputs, contiguous and row-major:
  q_index_fp8        [B, 64, 128]     float8_e4m3fn  queries
  k_index_cache_fp8  [P, 64, 1, 132]  int8           one key per token; the bytes of a page are laid out as below
  weights            [B, 64]          float32        of the heads, of either sign
  seq_lens           [B]              int32          tokens of each request, 0 <= seq_lens[b] <= 64 W
  block_table        [B, W]           int32          column p holds the page of the request's tokens 64 p ... 64 p + 63;
                                                     0 in columns that the request does not need
  topk               int                             how many tokens to select, > 0

Output, contiguous and row-major:
  topk_indices       [B, topk]        int32          slots 64 * page + row, then -1

The shape of k_index_cache_fp8 only counts bytes. Page g is 64 * 132 = 8448 bytes in a row: first 64 x 128 float8_e4m3fn
values, channel d of row r at byte 128 r + d; then 64 float32 scales, little-endian, that of row r at byte 8192 + 4 r.
All scales of tokens are positive.

For request b and its token t < seq_lens[b], at row r = t % 64 of page g = block_table[b, t // 64], in float32:
  k_t = value[g, r] * scale[g, r]
  score_t = sum over heads h of max(dot(q_index_fp8[b, h], k_t), 0) * weights[b, h]
The request selects the min(topk, seq_lens[b]) tokens with the largest scores. topk_indices[b] lists the slots 64 g + r
of the selected tokens in the order of t, from the first token to the last; -1 fills the remaining entries.

Numerics: fp8 values are exact in float32 (and in bfloat16 and float16); products are accumulated in float32. Where
there is a choice, the lowest selected and the highest unselected score of a request differ by 0.5 at least (scores have
a deviation of about 43), and the slots are compared exactly.

Rules:
- The negative part of a head's product is dropped before the heads are summed. Scores may be negative.
- Page 0 belongs to no request, and a page belongs to one request at most.
- Rows of a last page beyond seq_lens[b], and pages of no request, page 0 among them, may hold anything, NaN values and
  scales included, and must not influence the result.
- A request with seq_lens[b] = 0 has -1 only.
- seq_lens is fixed by the workload and its values are visible to host code; block_table is not.
- The inputs are not changed; topk_indices is a new tensor.
"""

from __future__ import annotations

import math

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, offsets, permutation, uniform

TITLE = "Top-k selection by fp8 scores, 64 heads, page size 64"
NUMBER = 18
MODEL = "DeepSeek-V3.2"
INPUTS = ("q_index_fp8", "k_index_cache_fp8", "weights", "seq_lens", "block_table", "topk")
OUTPUTS = ("topk_indices",)
HOST_VISIBLE = ("seq_lens",)
HEADS, HEAD_DIM, PAGE = 64, 128, 64
VALUE_BYTES, PAGE_BYTES = PAGE * HEAD_DIM, PAGE * (HEAD_DIM + 4)
MARGIN = 0.25
NAN_CODE = 0x7F
# "poison": what belongs to no request holds NaN. "positive": no head's weight is negative.
WORKLOADS = {
    "full": {
        "seq_lens": [64 + 101 * b for b in range(20)] + [3000 + 1000 * i for i in range(12)] + [2048, 0, 2049],
        "topk": 2048,
        "P": 4096,
        "W": 224,
        "poison": True,
    },
    "small": {"seq_lens": [128, 100, 40, 64, 0, 65], "topk": 64, "P": 10, "W": 2, "poison": True},
    "heldout": [
        {"seq_lens": [2048, 2049, 0, 1, 6001], "topk": 2048, "P": 200, "W": 100},
        {
            "seq_lens": [1 + 701 * b % 5003 for b in range(9)],
            "topk": 512,
            "P": 512,
            "W": 80,
            "positive": True,
            "poison": True,
        },
        {"seq_lens": [41, 0, 130, 7], "topk": 40, "P": 9, "W": 4, "poison": True},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """How many tokens each request has."""
    return {"seq_lens": shape["seq_lens"]}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    batch = len(shape["seq_lens"])
    return (
        ((batch, HEADS, HEAD_DIM), torch.float8_e4m3fn),
        ((shape["P"], PAGE, 1, HEAD_DIM + 4), torch.int8),
        ((batch, HEADS), torch.float32),
        ((batch,), torch.int32),
        ((batch, shape["W"]), torch.int32),
        shape["topk"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((len(shape["seq_lens"]), shape["topk"]), torch.int32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | int, ...]:
    """Standard normal queries, keys and weights, scales in [0.5, 1), random pages.

    Scales of tokens whose score is near the border of a selection are changed a little, so that scores leave a gap of
    2 ``MARGIN`` there and stay in order; queries of requests whose border is too near 0 for that are drawn again.
    """
    lengths, topk, device = shape["seq_lens"], shape["topk"], generator.device
    weights = normal(generator, len(lengths), HEADS)
    if shape.get("positive"):
        weights.abs_()
    values = normal(generator, shape["P"], VALUE_BYTES, dtype=torch.float8_e4m3fn)
    scales = uniform(generator, shape["P"], PAGE, low=0.5)
    block_table, seq_lens = _draw_table(generator, shape), torch.tensor(lengths, dtype=torch.int32, device=device)
    visible = torch.arange(shape["W"] * PAGE, device=device) < seq_lens[:, None]
    q = normal(generator, len(lengths), HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn)
    for _ in range(64):
        scored = scores(q.double(), values, scales, weights, seq_lens, block_table)
        ranked = scored.sort(dim=1, descending=True).values
        border = torch.where(seq_lens > topk, ranked[:, [topk - 1, min(topk, ranked.shape[1] - 1)]].mean(1), math.inf)
        if not (near := border.abs() < 2 * MARGIN).any():
            break
        fresh = normal(generator, *q.shape, dtype=torch.float8_e4m3fn)
        q = torch.where(near[:, None, None], fresh.view(torch.uint8), q.view(torch.uint8)).view(torch.float8_e4m3fn)
    else:
        raise RuntimeError("no queries found that leave room for a gap")
    border = border[:, None]
    wanted = torch.where(scored > border, scored.clamp(min=border + MARGIN), scored.clamp(max=border - MARGIN))
    factor = torch.where(visible & border.isfinite() & (wanted != scored), wanted / scored, 1.0)
    scales[block_table] = (scales[block_table] * factor.view(*block_table.shape, PAGE)).float()
    if shape.get("poison"):
        owned = torch.zeros_like(scales, dtype=torch.bool)
        owned[block_table] = visible.view(*block_table.shape, PAGE)
        scales.masked_fill_(~owned, math.nan)
        values.view(torch.int8).view(-1, PAGE, HEAD_DIM).masked_fill_(~owned[..., None], NAN_CODE)
    pages = torch.cat((values.view(torch.int8), scales.view(torch.int8)), dim=1)
    return q, pages.view(-1, PAGE, 1, HEAD_DIM + 4), weights, seq_lens, block_table, topk


def _draw_table(generator: torch.Generator, shape: Shape) -> torch.Tensor:
    """Pages other than 0, each for one request, int32 [B, W]."""
    pages = torch.tensor([-(-length // PAGE) for length in shape["seq_lens"]], device=generator.device)
    first = torch.tensor(offsets([-(-length // PAGE) for length in shape["seq_lens"]])[:-1], device=generator.device)
    column = torch.arange(shape["W"], device=generator.device)
    free = permutation(generator, shape["P"] - 1) + 1
    table = free[(first[:, None] + column).clamp(max=shape["P"] - 2)]
    return torch.where(column < pages[:, None], table, 0)


def scores(
    q: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Scores by logical position in q's type, [B, 64 W]; -inf beyond ``seq_lens``."""
    keys = values.view(-1, PAGE, HEAD_DIM).to(q.dtype)[block_table] * scales[block_table][..., None]
    products = (q @ keys.flatten(1, 2).mT).relu_()
    total = (products * weights[..., None]).sum(dim=1)
    visible = torch.arange(total.shape[1], device=q.device) < seq_lens[:, None]
    return torch.where(visible, total, -math.inf)


def unpack(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache's fp8 values [P, 64 * 128] and scales [P, 64]."""
    pages = cache.view(-1, PAGE_BYTES)
    values, scales = pages[:, :VALUE_BYTES].contiguous(), pages[:, VALUE_BYTES:].contiguous()
    return values.view(torch.float8_e4m3fn), scales.view(torch.float32)


def slots_of(selected: torch.Tensor, block_table: torch.Tensor, topk: int) -> torch.Tensor:
    """Slots of the selected logical positions, bool [B, 64 W], in their order, filled with -1 to [B, topk]."""
    count = selected.shape[1]
    positions = torch.where(selected, torch.arange(count, device=selected.device), count).sort(dim=1).values
    positions = torch.nn.functional.pad(positions, (0, max(0, topk - count)), value=count)[:, :topk]
    pages = block_table.gather(1, (positions // PAGE).clamp(max=block_table.shape[1] - 1))
    return torch.where(positions < count, pages * PAGE + positions % PAGE, -1).to(torch.int32)


def reference(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """The module's formula for all requests at once; float64 weights make all math float64."""
    q, (values, scales) = q_index_fp8.to(weights.dtype), unpack(k_index_cache_fp8)
    scored = scores(q, values, scales, weights, seq_lens, block_table)
    highest = scored.topk(min(topk, scored.shape[1]), dim=1).indices
    selected = torch.zeros_like(scored, dtype=torch.bool).scatter_(1, highest, True) & (scored > -math.inf)
    return slots_of(selected, block_table, topk)


def COST(shape: Shape) -> Cost:
    """Each token's key, the queries, weights, used page ids and the output cross memory once."""
    lengths, batch = shape["seq_lens"], len(shape["seq_lens"])
    tokens, pages = sum(lengths), sum(-(-length // PAGE) for length in lengths)
    moved = (HEAD_DIM + 4) * tokens + batch * HEADS * (HEAD_DIM + 4) + 4 * (batch + pages + batch * shape["topk"])
    return Cost(bytes=moved, flops=2 * HEADS * HEAD_DIM * tokens, unit="fp8")
