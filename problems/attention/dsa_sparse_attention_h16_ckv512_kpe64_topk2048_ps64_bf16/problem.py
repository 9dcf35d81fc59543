"""Absorbed latent attention over a list of selected cache rows per token (DeepSeek-V3.2 sparse attention).

There are T query tokens, 16 heads, 512 latent and 64 rotary channels, P cache pages of 64 tokens and K list entries per
token. A slot is 64 * page + row in the page.

Inputs, contiguous and row-major:
  q_nope          [T, 16, 512]  bfloat16  queries in the latent space (already multiplied by the key matrix)
  q_pe            [T, 16, 64]   bfloat16  rotary channels of the queries, already rotated
  ckv_cache       [P, 64, 512]  bfloat16  latent rows by page and row: keys and values at once
  kpe_cache       [P, 64, 64]   bfloat16  rotary channels of the keys by page and row, already rotated
  sparse_indices  [T, K]        int32     slots in [0, 64 P), or -1 where there is no entry
  sm_scale        float                   factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [T, 16, 512]  bfloat16  in the latent space (not yet multiplied by the value matrix)
  lse     [T, 16]       float32

For token t with the slots s_0 ... s_{n-1} of its entries other than -1, and head h, in float32, where c_j and e_j are
the rows of ckv_cache and kpe_cache at page s_j // 64, row s_j % 64:
  l_j = (dot(q_nope[t, h], c_j) + dot(q_pe[t, h], e_j)) * sm_scale
  lse[t, h] = log2(sum_j exp(l_j))                     (that is logsumexp(l) / ln 2; exp is to base e)
  output[t, h] = sum_j softmax(l)_j * c_j, rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- All 16 heads share the rows of the caches.
- Every entry other than -1 is visible; there is no causal mask. A token's slots are all different.
- Most lists hold their slots first and -1 after them, but in some lists the two are mixed in any order.
- A token whose entries are all -1 has output 0 and lse -inf, not NaN.
- Cache rows that no token lists, that of slot 0 among them, may hold anything, NaN included, and must not influence the
  result.
- sm_scale is an argument: it follows from the model's heads before they were absorbed, not from 512 or 576 channels.
- Logits may be several hundred in size.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

import math

import torch

from mkb_env.problems.attention.common import amplify, softmax_allowance
from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, offsets, permutation, uniform

TITLE = "Sparse latent attention over selected rows, 16 heads, page size 64"
NUMBER = 17
MODEL = "DeepSeek-V3.2, tensor parallelism 8"
INPUTS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "sparse_indices", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ()
PAGE = 64
SM_SCALE = 0.1352337788608801
"""192^-0.5 (0.1 ln 40 + 1)^2: 192 channels before absorption; the model's scaling of positions."""
# "tokens": [selected, context] of each. Every "mixed"-th list has slots and -1 in random order. "poison": unlisted rows
# hold NaN. "loud": see `amplify`.
WORKLOADS = {
    "full": {
        "tokens": [
            *([2048, 2500 + 250 * t] for t in range(24)),
            *([5 + 47 * t] * 2 for t in range(39)),
            *([1, 1], [0, 0]),
        ],
        "K": 2048,
        "P": 4096,
        "loud": [4, 16],
        "sm_scale": SM_SCALE,
        "mixed": 8,
        "poison": True,
    },
    "small": {
        "tokens": [[32, 32], [19, 19], [1, 1], [0, 0]],
        "K": 32,
        "P": 4,
        "loud": [1, 16],
        "sm_scale": SM_SCALE,
        "mixed": 2,
        "poison": True,
    },
    "heldout": [
        {
            "tokens": [[2048, 9000], [1, 1], [2047, 2100], [65, 65], [0, 0], [1000, 5000], [64, 70]],
            "K": 2048,
            "P": 400,
            "sm_scale": SM_SCALE,
            "mixed": 1,
        },
        {
            "tokens": [[min(512, 16 * t), min(512, 16 * t) + 3 * t] for t in range(33)],
            "K": 512,
            "P": 700,
            "sm_scale": SM_SCALE,
            "poison": True,
        },
        {
            "tokens": [[40, 70], [0, 9], [7, 7], [33, 50], [1, 3]],
            "K": 40,
            "P": 9,
            "loud": [1, 32],
            "sm_scale": 192**-0.5,
            "mixed": 1,
            "poison": True,
        },
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, pages = len(shape["tokens"]), shape["P"]
    return (
        ((tokens, 16, 512), torch.bfloat16),
        ((tokens, 16, 64), torch.bfloat16),
        ((pages, PAGE, 512), torch.bfloat16),
        ((pages, PAGE, 64), torch.bfloat16),
        ((tokens, shape["K"]), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    tokens = len(shape["tokens"])
    return ((tokens, 16, 512), torch.bfloat16), ((tokens, 16), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Standard normal queries and cache; lists of random positions in contexts on pages of their own."""
    *tensors, _, _ = input_specs(shape)
    q_nope, q_pe, ckv_cache, kpe_cache = (normal(generator, *size, dtype=dtype) for size, dtype in tensors)
    for queries in (q_nope, q_pe):
        amplify(queries, shape)
    indices = _draw_lists(generator, shape)
    if shape.get("poison"):
        listed = torch.zeros(shape["P"] * PAGE + 1, dtype=torch.bool, device=generator.device)
        listed[indices.flatten().long()] = True  # -1 is the additional place
        for cache in (ckv_cache, kpe_cache):
            cache.masked_fill_(~listed[:-1].view(-1, PAGE, 1), math.nan)
    return q_nope, q_pe, ckv_cache, kpe_cache, indices, shape["sm_scale"]


def _draw_lists(generator: torch.Generator, shape: Shape) -> torch.Tensor:
    """Sorted random positions of every context as slots, then -1; some lists in random order. int32 [T, K]."""
    device, entries, longest = generator.device, shape["K"], max(context for _, context in shape["tokens"])
    selected, context = torch.tensor(shape["tokens"], device=device)[..., None].unbind(1)
    first = torch.tensor(offsets([-(-size // PAGE) for _, size in shape["tokens"]])[:-1], device=device)[:, None]
    noise = uniform(generator, len(selected), max(longest, entries))
    noise.masked_fill_(torch.arange(noise.shape[1], device=device) >= context, 2.0)
    positions = noise.argsort(dim=1)[:, :entries]
    valid = torch.arange(entries, device=device) < selected
    positions = positions.masked_fill(~valid, noise.shape[1]).sort(dim=1).values
    pages = permutation(generator, shape["P"], torch.int64)
    slots = pages[(first + positions // PAGE).clamp(max=shape["P"] - 1)] * PAGE + positions % PAGE
    slots = slots.masked_fill(~valid, -1)
    order = uniform(generator, *slots.shape).argsort(dim=1)
    mixed = torch.arange(len(slots), device=device)[:, None] % shape.get("mixed", len(slots) + 1)
    rows = mixed == shape.get("mixed", 0) - 1
    return torch.where(rows, slots.gather(1, order), slots).to(torch.int32)


def reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula for all tokens at once; float64 inputs are computed in float64."""
    wide = torch.promote_types(q_nope.dtype, torch.float32)
    absent = sparse_indices < 0
    rows = sparse_indices.long().clamp(min=0)
    values, rotary = (cache.flatten(0, 1)[rows].to(wide) for cache in (ckv_cache, kpe_cache))
    # A row that no list names may hold NaN, and 0 times NaN is NaN.
    values.masked_fill_(absent[..., None], 0.0)
    logits = (q_nope.to(wide) @ values.mT + q_pe.to(wide) @ rotary.mT) * sm_scale
    logits.masked_fill_(absent[:, None], -math.inf)
    empty = absent.all(dim=1)[:, None, None]
    output = (logits.softmax(dim=-1).masked_fill(empty, 0.0) @ values).to(q_nope.dtype)
    return output, logits.logsumexp(dim=-1) / math.log(2)


allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Listed rows, queries, lists and outputs cross memory once; per row and head 576 key and 512 value channels."""
    tokens, listed = len(shape["tokens"]), sum(selected for selected, _ in shape["tokens"])
    moved = 2 * 576 * listed + 2 * tokens * 16 * (576 + 512) + 4 * tokens * shape["K"] + 4 * tokens * 16
    return Cost(bytes=moved, flops=2 * listed * 16 * (576 + 512), unit="bf16")
