"""Causal attention of new tokens over a key/value cache in pages of 64 tokens (Llama-3.2-3B chunked prefill).

There are B requests with Tq query tokens in all, 24 query heads, 8 key/value heads, 128 channels per head, P pages of
64 tokens and N listed pages in all. The keys and values of the query tokens are in the cache already.

Inputs, contiguous and row-major:
  q                 [Tq, 24, 128]    bfloat16  queries of all requests, one request after another, already rotated
  k_cache           [P, 64, 8, 128]  bfloat16  keys by page and row
  v_cache           [P, 64, 8, 128]  bfloat16  values by page and row
  qo_indptr         [B + 1]          int32     0 = qo_indptr[0] <= ... <= qo_indptr[B] = Tq
  kv_indptr         [B + 1]          int32     counts pages: 0 = kv_indptr[0] <= ... <= kv_indptr[B] = N
  kv_indices        [N]              int32     pages in [0, P): those of request b begin at place kv_indptr[b]
  kv_last_page_len  [B]              int32     tokens in the last page, 1 to 64; 0 for a request without pages
  sm_scale          float                      factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [Tq, 24, 128]  bfloat16
  lse     [Tq, 24]       float32

For request b with n = qo_indptr[b + 1] - qo_indptr[b] queries and m keys, key j in row r_j = j mod 64 of page p_j =
kv_indices[kv_indptr[b] + j // 64], query i = 0 ... n - 1 in row t = qo_indptr[b] + i, and query head h, which reads
key/value head g = h // 3, in float32:
  l_j = dot(q[t, h], k_cache[p_j, r_j, g]) * sm_scale    for the visible keys, j <= i + (m - n)
  lse[t, h] = log2(sum_j exp(l_j))                  (that is logsumexp(l) / ln 2; exp is to base e)
  output[t, h] = sum_j softmax(l)_j * v_cache[p_j, r_j, g], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- m = 64 (kv_indptr[b + 1] - kv_indptr[b] - 1) + kv_last_page_len[b]; a full last page has kv_last_page_len[b] = 64. A
  request without pages has m = 0; its kv_last_page_len is 0 and means nothing.
- The causal rule is aligned at the end: the last query of a request sees all of its m keys; m - n is the length of the
  prefix that was in the cache before, and may be negative.
- Queries that see no key have output 0 and lse -inf, not NaN: with n > m these are the first n - m queries of a
  request, with m = 0 all of them.
- n, m, or both may be 0. A request with n = 0 has no row in the outputs, but may well have keys.
- The order of the list is the order of the keys, while the page ids are in no order. Requests may share pages.
- Cache rows that belong to no request, the rows of a last page beyond its length among them, may hold anything, NaN
  included, and must not influence the result.
- qo_indptr, kv_indptr and kv_last_page_len are fixed by the workload and their values are visible to host code;
  kv_indices is not.
- Logits may be several hundred in size.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.attention.common import counts, draw_inputs, layout, page_prefill, softmax_allowance
from mkb_env.problems.contract import Cost, Shape, Spec

TITLE = "Causal paged prefill, 24 query heads on 8 key/value heads, page size 64"
NUMBER = 6
MODEL = "Llama-3.2-3B"
INPUTS = ("q", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("qo_indptr", "kv_indptr", "kv_last_page_len")
SM_SCALE = 128**-0.5
WORKLOADS = {
    "full": {
        "requests": [
            *([96 + 40 * b, 64 * (5 + 5 * b) + 1 + 29 * b % 64] for b in range(12)),
            *([0, 0], [0, 70], [7, 3], [2, 0], [1, 64]),
        ],
        "P": 1024,
        "loud": [4, 64],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "small": {
        "requests": [[3, 67], [4, 4], [1, 64], [7, 3], [0, 0], [2, 0], [0, 5]],
        "P": 8,
        "loud": [1, 64],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "heldout": [
        {
            "requests": [[1, 64], [200, 265], [0, 128], [65, 65], [300, 1500], [128, 128]],
            "P": 64,
            "sm_scale": SM_SCALE,
            "shared_prefix": 1,
        },
        {
            "requests": [[100, 4001], [7, 3], [0, 0], [63, 63], [513, 513]],
            "P": 96,
            "sm_scale": SM_SCALE,
            "poison": True,
        },
        {"requests": [[1, 128], [0, 1], [3, 130], [9, 8]], "P": 11, "loud": [1, 64], "sm_scale": 0.125, "poison": True},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each request's queries and pages begin, and how many tokens its last page has."""
    return {name: layout(shape, 64)[name] for name in HOST_VISIBLE}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    size = counts(shape, 64)
    cache, bounds = ((shape["P"], 64, 8, 128), torch.bfloat16), ((size.requests + 1,), torch.int32)
    return (
        ((size.queries, 24, 128), torch.bfloat16),
        cache,
        cache,
        bounds,
        bounds,
        ((size.pages,), torch.int32),
        ((size.requests,), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    queries = counts(shape).queries
    return ((queries, 24, 128), torch.bfloat16), ((queries, 24), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal queries and cache, a random placement of pages, in ``INPUTS``' order.

    With ``shared_prefix`` = s, all requests of more than s pages have the first s pages of the first such request. With
    ``poison``, cache rows that belong to no request hold NaN.
    """
    return draw_inputs(generator, shape, INPUTS, input_specs(shape), 64)


reference = page_prefill
allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Visible keys and values, queries, indices and outputs cross memory once; two multiply-adds per visible pair,
    channel and head.
    """
    size = counts(shape, 64)
    cache = 2 * 2 * size.read * 8 * 128
    others = 2 * 2 * size.queries * 24 * 128 + 4 * size.pages + 4 * size.queries * 24 + 4 * (3 * size.requests + 2)
    return Cost(bytes=cache + others, flops=4 * size.pairs * 24 * 128, unit="bf16")
