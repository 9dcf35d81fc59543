"""Attention of one new token per request over a key/value cache in pages of 64 tokens (Llama-3.1-8B decode).

There are B requests, 32 query heads, 8 key/value heads, 128 channels per head, P pages of 64 tokens and N listed pages
in all.

Inputs, contiguous and row-major:
  q                 [B, 32, 128]     bfloat16  one query token per request, already rotated
  k_cache           [P, 64, 8, 128]  bfloat16  keys by page and row
  v_cache           [P, 64, 8, 128]  bfloat16  values by page and row
  kv_indptr         [B + 1]          int32     counts pages: 0 = kv_indptr[0] <= ... <= kv_indptr[B] = N
  kv_indices        [N]              int32     pages in [0, P): those of request b begin at place kv_indptr[b]
  kv_last_page_len  [B]              int32     tokens in the last page, 1 to 64; 0 for a request without pages
  sm_scale          float                      factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [B, 32, 128]  bfloat16
  lse     [B, 32]       float32

For request b with m tokens, token j in row r_j = j mod 64 of page p_j = kv_indices[kv_indptr[b] + j // 64], and query
head h, which reads key/value head g = h // 4, in float32:
  l_j = dot(q[b, h], k_cache[p_j, r_j, g]) * sm_scale
  lse[b, h] = log2(sum_j exp(l_j))                  (that is logsumexp(l) / ln 2; exp is to base e)
  output[b, h] = sum_j softmax(l)_j * v_cache[p_j, r_j, g], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- m = 64 (kv_indptr[b + 1] - kv_indptr[b] - 1) + kv_last_page_len[b]; a full last page has kv_last_page_len[b] = 64.
- A request without pages has m = 0, output 0 and lse -inf, not NaN; its kv_last_page_len is 0 and means nothing.
- Every token of a request is visible; there is no causal mask.
- Pages appear in no particular order. Requests may share pages.
- Cache rows that belong to no request, the rows of a last page beyond its length among them, may hold anything, NaN
  included, and must not influence the result.
- kv_indptr and kv_last_page_len are fixed by the workload and their values are visible to host code; kv_indices is not.
- Logits may be several hundred in size.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.attention.common import (
    Attend,
    attend_requests,
    counts,
    draw_inputs,
    layout,
    paged,
    singles,
    softmax_allowance,
)
from mkb_env.problems.contract import Cost, Shape, Spec

TITLE = "Paged decode attention, 32 query heads on 8 key/value heads, page size 64"
NUMBER = 3
MODEL = "Llama-3.1-8B"
INPUTS = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "kv_last_page_len", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("kv_indptr", "kv_last_page_len")
SM_SCALE = 128**-0.5
PAGES = [*(16 + b for b in range(48)), *(80 + 8 * i for i in range(12)), 160, 224, 320, 512]
"""Pages of the requests of ``full``."""
WORKLOADS = {
    "full": {
        "lengths": [*(64 * (pages - 1) + 1 + 37 * b % 64 for b, pages in enumerate(PAGES)), 0],
        "P": 6000,
        "loud": [2, 64],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "small": {"lengths": [5, 67, 0, 64], "P": 6, "loud": [1, 64], "sm_scale": SM_SCALE, "poison": True},
    "heldout": [
        {"lengths": [1 + 1237 * b % 9001 for b in range(9)], "P": 800, "sm_scale": SM_SCALE, "shared_prefix": 2},
        {"lengths": [0, 64, 65, 4097, 1, 12800], "P": 300, "sm_scale": SM_SCALE, "poison": True},
        {"lengths": [63, 0, 130, 128, 1], "P": 11, "loud": [1, 64], "sm_scale": 0.125, "poison": True},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each request's pages begin, and how many tokens its last page has."""
    return {name: layout(shape, 64)[name] for name in HOST_VISIBLE}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    size = counts(shape, 64)
    cache = (shape["P"], 64, 8, 128), torch.bfloat16
    return (
        ((size.requests, 32, 128), torch.bfloat16),
        cache,
        cache,
        ((size.requests + 1,), torch.int32),
        ((size.pages,), torch.int32),
        ((size.requests,), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    batch = len(shape["lengths"])
    return ((batch, 32, 128), torch.bfloat16), ((batch, 32), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal queries and cache, a random placement of pages, in ``INPUTS``' order.

    With ``shared_prefix`` = s, all requests of more than s pages have the first s pages of the first such request. With
    ``poison``, cache rows that belong to no request hold NaN.
    """
    return draw_inputs(generator, shape, INPUTS, input_specs(shape), 64)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
    attention: Attend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    requests, rows = paged(singles(len(q)), kv_indptr, kv_indices, kv_last_page_len, page=64)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return attend_requests(q, keys, values, requests, sm_scale, attention, rows)


allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Listed tokens, queries, indices and outputs cross memory once; two multiply-adds per key channel and head."""
    size = counts(shape, 64)
    cache = 2 * 2 * size.read * 8 * 128
    others = 2 * 2 * size.queries * 32 * 128 + 4 * size.pages + 4 * size.queries * 32 + 4 * (2 * size.requests + 1)
    return Cost(bytes=cache + others, flops=4 * size.pairs * 32 * 128, unit="bf16")
