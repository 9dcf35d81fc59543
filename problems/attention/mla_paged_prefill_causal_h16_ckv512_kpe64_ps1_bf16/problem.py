"""Absorbed latent attention of new tokens over a paged latent cache, causal (DeepSeek-V3 incremental prefill).

There are B requests with Tq query tokens in all, 16 heads, 512 latent and 64 rotary channels, P cache slots (pages of
one token) and N listed slots in all. The rows of the query tokens are in the caches already.

Inputs, contiguous and row-major:
  q_nope      [Tq, 16, 512]  bfloat16  queries in the latent space (already multiplied by the key matrix)
  q_pe        [Tq, 16, 64]   bfloat16  rotary channels of the queries, already rotated
  ckv_cache   [P, 1, 512]    bfloat16  latent rows by slot: keys and values at once
  kpe_cache   [P, 1, 64]     bfloat16  rotary channels of the keys by slot, already rotated
  qo_indptr   [B + 1]        int32     0 = qo_indptr[0] <= ... <= qo_indptr[B] = Tq
  kv_indptr   [B + 1]        int32     0 = kv_indptr[0] <= kv_indptr[1] <= ... <= kv_indptr[B] = N
  kv_indices  [N]            int32     slots in [0, P); request b lists kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
  sm_scale    float                    factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [Tq, 16, 512]  bfloat16  in the latent space (not yet multiplied by the value matrix)
  lse     [Tq, 16]       float32

For request b with n = qo_indptr[b + 1] - qo_indptr[b] queries and m = kv_indptr[b + 1] - kv_indptr[b] slots s_0 ...
s_{m-1}, query i = 0 ... n - 1 in row t = qo_indptr[b] + i, and head h, in float32:
  l_j = (dot(q_nope[t, h], ckv_cache[s_j, 0]) + dot(q_pe[t, h], kpe_cache[s_j, 0])) * sm_scale
                                                     for the visible keys, j <= i + (m - n)
  lse[t, h] = log2(sum_j exp(l_j))                     (that is logsumexp(l) / ln 2; exp is to base e)
  output[t, h] = sum_j softmax(l)_j * ckv_cache[s_j, 0], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- All 16 heads share the rows of the caches.
- The causal rule is aligned at the end: the last query of a request sees all of its m keys; m - n is the length of the
  prefix that was in the cache before, and may be negative.
- Queries that see no key have output 0 and lse -inf, not NaN: with n > m these are the first n - m queries of a
  request, with m = 0 all of them.
- n, m, or both may be 0. A request with n = 0 has no row in the outputs, but may well have keys.
- The order of the list is the order of the keys, while the slots themselves are in no order. Requests may share slots.
- Cache slots that no request lists may hold anything, NaN included, and must not influence the result.
- sm_scale is an argument: it follows from the model's heads before they were absorbed, not from 512 or 576 channels.
- qo_indptr and kv_indptr are fixed by the workload and their values are visible to host code; kv_indices is not.
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
    softmax_allowance,
    spans,
)
from mkb_env.problems.contract import Cost, Shape, Spec

TITLE = "Causal paged prefill, absorbed latent attention, 16 heads, page size 1"
NUMBER = 15
MODEL = "DeepSeek-V3, tensor parallelism 8"
INPUTS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "qo_indptr", "kv_indptr", "kv_indices", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("qo_indptr", "kv_indptr")
SM_SCALE = 0.1352337788608801
"""192^-0.5 (0.1 ln 40 + 1)^2: 192 channels before absorption; the model's scaling of positions."""
QUERIES = [*(1 + 53 * b % 131 for b in range(24)), 300, 420, 640, 1000]
"""Of the requests of ``full``."""
WORKLOADS = {
    "full": {
        "requests": [
            *([n, n + 2 + 19 * b % 60] for b, n in enumerate(QUERIES)),
            *([0, 0], [0, 15], [13, 5], [2, 0]),
        ],
        "P": 131072,
        "loud": [6, 16],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "small": {
        "requests": [[7, 12], [4, 4], [0, 3], [5, 2], [0, 0], [2, 0], [1, 9]],
        "P": 64,
        "loud": [3, 16],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "heldout": [
        {
            "requests": [[1, 1], [20, 23], [0, 15], [333, 500], [64, 64], [129, 700]],
            "P": 4096,
            "sm_scale": SM_SCALE,
        },
        {
            "requests": [[0, 0], [13, 5], [257, 257], [3, 2050], [65, 66]],
            "P": 2500,
            "sm_scale": SM_SCALE,
            "poison": True,
        },
        {
            "requests": [[2, 0], [9, 13], [4, 1], [0, 3], [11, 11]],
            "P": 37,
            "loud": [5, 32],
            "sm_scale": 192**-0.5,
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
    bounds = (size.requests + 1,), torch.int32
    return (
        ((size.queries, 16, 512), torch.bfloat16),
        ((size.queries, 16, 64), torch.bfloat16),
        ((shape["P"], 1, 512), torch.bfloat16),
        ((shape["P"], 1, 64), torch.bfloat16),
        bounds,
        bounds,
        ((size.keys,), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    queries = counts(shape).queries
    return ((queries, 16, 512), torch.bfloat16), ((queries, 16), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal queries and cache, a random placement of tokens in slots, in ``INPUTS``' order.

    With ``poison``, slots that no request lists hold NaN.
    """
    return draw_inputs(generator, shape, INPUTS, input_specs(shape))


def reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    attention: Attend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    q, keys = torch.cat((q_nope, q_pe), dim=-1), torch.cat((ckv_cache, kpe_cache), dim=-1)
    requests, rows = paged(spans(qo_indptr), kv_indptr, kv_indices)
    return attend_requests(q, keys, ckv_cache, requests, sm_scale, attention, rows)


allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Visible slots, queries, indices and outputs cross memory once; a row of 576 keys and 512 values per pair and
    head.
    """
    size = counts(shape)
    rows = 2 * 576 * size.read + 2 * size.queries * 16 * (576 + 512)
    others = 4 * size.keys + 4 * size.queries * 16 + 8 * (size.requests + 1)
    return Cost(bytes=rows + others, flops=2 * size.pairs * 16 * (576 + 512), unit="bf16")
