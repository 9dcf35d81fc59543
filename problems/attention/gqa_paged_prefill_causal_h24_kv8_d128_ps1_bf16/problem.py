"""Causal attention of new tokens over a paged key/value cache with one token per page (Llama-3.2-3B prefill).

There are B requests with Tq query tokens in all, 24 query heads, 8 key/value heads, 128 channels per head, P cache
slots and N listed slots in all. The keys and values of the query tokens are in the cache already.

Inputs, contiguous and row-major:
  q           [Tq, 24, 128]   bfloat16  queries of all requests, one request after another, already rotated
  k_cache     [P, 1, 8, 128]  bfloat16  keys by slot
  v_cache     [P, 1, 8, 128]  bfloat16  values by slot
  qo_indptr   [B + 1]         int32     0 = qo_indptr[0] <= ... <= qo_indptr[B] = Tq
  kv_indptr   [B + 1]         int32     0 = kv_indptr[0] <= kv_indptr[1] <= ... <= kv_indptr[B] = N
  kv_indices  [N]             int32     slots in [0, P); request b lists kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
  sm_scale    float                     factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [Tq, 24, 128]  bfloat16
  lse     [Tq, 24]       float32

For request b with n = qo_indptr[b + 1] - qo_indptr[b] queries and m = kv_indptr[b + 1] - kv_indptr[b] slots s_0 ...
s_{m-1}, query i = 0 ... n - 1 in row t = qo_indptr[b] + i, and query head h, which reads key/value head g = h // 3, in
float32:
  l_j = dot(q[t, h], k_cache[s_j, 0, g]) * sm_scale    for the visible keys, j <= i + (m - n)
  lse[t, h] = log2(sum_j exp(l_j))                  (that is logsumexp(l) / ln 2; exp is to base e)
  output[t, h] = sum_j softmax(l)_j * v_cache[s_j, 0, g], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- The causal rule is aligned at the end: the last query of a request sees all of its m keys; m - n is the length of the
  prefix that was in the cache before, and may be negative.
- Queries that see no key have output 0 and lse -inf, not NaN: with n > m these are the first n - m queries of a
  request, with m = 0 all of them.
- n, m, or both may be 0. A request with n = 0 has no row in the outputs, but may well have keys.
- The order of the list is the order of the keys, while the slots themselves are in no order. Requests may share slots.
- Cache slots that no request lists may hold anything, NaN included, and must not influence the result.
- qo_indptr and kv_indptr are fixed by the workload and their values are visible to host code; kv_indices is not.
- Logits may be several hundred in size.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.attention.common import counts, draw_inputs, layout, paged_prefill, softmax_allowance
from mkb_env.problems.contract import Cost, Shape, Spec

TITLE = "Causal paged prefill, 24 query heads on 8 key/value heads, page size 1"
NUMBER = 4
MODEL = "Llama-3.2-3B"
INPUTS = ("q", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("qo_indptr", "kv_indptr")
SM_SCALE = 128**-0.5
WORKLOADS = {
    "full": {
        "requests": [
            *([128 + 40 * b, 128 + 40 * b + (37 * b if b % 3 else 0)] for b in range(24)),
            *([0, 0], [0, 40], [10, 4], [3, 0]),
        ],
        "P": 32768,
        "loud": [8, 64],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "small": {
        "requests": [[9, 9], [5, 17], [0, 5], [6, 2], [2, 0], [0, 0], [1, 4]],
        "P": 48,
        "loud": [4, 64],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "heldout": [
        {
            "requests": [[1, 33], [77, 77], [0, 40], [513, 1000], [129, 129], [250, 251], [3, 3]],
            "P": 2048,
            "sm_scale": SM_SCALE,
        },
        {"requests": [[640, 641], [0, 0], [95, 95], [10, 4]], "P": 800, "sm_scale": SM_SCALE, "poison": True},
        {
            "requests": [[3, 0], [13, 21], [4, 1], [11, 11], [0, 6]],
            "P": 53,
            "loud": [7, 64],
            "sm_scale": 0.125,
            "poison": True,
        },
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each request's queries and slots begin."""
    return {name: layout(shape)[name] for name in HOST_VISIBLE}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    size = counts(shape)
    cache, bounds = ((shape["P"], 1, 8, 128), torch.bfloat16), ((size.requests + 1,), torch.int32)
    return (
        ((size.queries, 24, 128), torch.bfloat16),
        cache,
        cache,
        bounds,
        bounds,
        ((size.keys,), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    queries = counts(shape).queries
    return ((queries, 24, 128), torch.bfloat16), ((queries, 24), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal queries and cache, a random placement of tokens in slots, in ``INPUTS``' order.

    With ``poison``, slots that no request lists hold NaN.
    """
    return draw_inputs(generator, shape, INPUTS, input_specs(shape))


reference = paged_prefill
allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Visible keys and values, queries, indices and outputs cross memory once; two multiply-adds per visible pair,
    channel and head.
    """
    size = counts(shape)
    cache = 2 * 2 * size.read * 8 * 128
    others = 2 * 2 * size.queries * 24 * 128 + 4 * size.keys + 4 * size.queries * 24 + 8 * (size.requests + 1)
    return Cost(bytes=cache + others, flops=4 * size.pairs * 24 * 128, unit="bf16")
