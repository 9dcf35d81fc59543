"""Attention of one new token per request over a paged cache, 5 query heads on one key/value head (Llama-4-Scout).

There are B requests, 5 query heads, 1 key/value head, 128 channels per head, P cache slots (pages of one token) and N
listed slots in all.

Inputs, contiguous and row-major:
  q           [B, 5, 128]     bfloat16  one query token per request, already rotated
  k_cache     [P, 1, 1, 128]  bfloat16  keys by slot
  v_cache     [P, 1, 1, 128]  bfloat16  values by slot
  kv_indptr   [B + 1]         int32     0 = kv_indptr[0] <= kv_indptr[1] <= ... <= kv_indptr[B] = N
  kv_indices  [N]             int32     slots in [0, P); request b lists kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
  sm_scale    float                     factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [B, 5, 128]  bfloat16
  lse     [B, 5]       float32

For request b with m = kv_indptr[b + 1] - kv_indptr[b] slots s_0 ... s_{m-1}, and query head h, which reads key/value
head 0, in float32:
  l_j = dot(q[b, h], k_cache[s_j, 0, 0]) * sm_scale
  lse[b, h] = log2(sum_j exp(l_j))                  (that is logsumexp(l) / ln 2; exp is to base e)
  output[b, h] = sum_j softmax(l)_j * v_cache[s_j, 0, 0], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- Every listed slot is visible; there is no causal mask.
- A request with m = 0 has output 0 and lse -inf, not NaN.
- Slots appear in no particular order. Requests may share slots. The slots of one request are all different.
- Cache slots that no request lists may hold anything, NaN included, and must not influence the result.
- kv_indptr is fixed by the workload and its values are visible to host code; kv_indices is not.
- Logits may be several hundred in size.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.attention.common import counts, draw_inputs, layout, paged_decode, softmax_allowance
from mkb_env.problems.contract import Cost, Shape, Spec

TITLE = "Paged decode attention, 5 query heads on 1 key/value head, page size 1"
NUMBER = 2
MODEL = "Llama-4-Scout-17B-16E, tensor parallelism 8"
INPUTS = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("kv_indptr",)
SM_SCALE = 128**-0.5
WORKLOADS = {
    "full": {
        "lengths": [
            *(7 + 5 * b for b in range(48)),
            0,
            *(300 + 90 * i for i in range(12)),
            *(2049, 4097, 6001, 9001, 0),
        ],
        "P": 53248,
        "loud": [4, 64],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "small": {"lengths": [64, 1, 0, 33, 18], "P": 128, "loud": [1, 64], "sm_scale": SM_SCALE, "poison": True},
    "heldout": [
        {"lengths": [1 + 211 * b % 2999 for b in range(33)], "P": 65536, "sm_scale": SM_SCALE},
        {"lengths": [0, 1, 2, 63, 65, 20011, 0], "P": 20480, "sm_scale": SM_SCALE, "poison": True},
        {"lengths": [5, 71, 0, 3, 130, 31], "P": 251, "loud": [2, 64], "sm_scale": 0.125, "poison": True},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each request's slots begin."""
    return {"kv_indptr": layout(shape)["kv_indptr"]}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    size = counts(shape)
    cache = (shape["P"], 1, 1, 128), torch.bfloat16
    return (
        ((size.requests, 5, 128), torch.bfloat16),
        cache,
        cache,
        ((size.requests + 1,), torch.int32),
        ((size.keys,), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    batch = len(shape["lengths"])
    return ((batch, 5, 128), torch.bfloat16), ((batch, 5), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal queries and cache, a random placement of tokens in slots, in ``INPUTS``' order.

    With ``poison``, slots that no request lists hold NaN.
    """
    return draw_inputs(generator, shape, INPUTS, input_specs(shape))


reference = paged_decode
allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Listed slots, queries, indices and outputs cross memory once; two multiply-adds per key channel and head."""
    size = counts(shape)
    cache = 2 * 2 * size.read * 128
    others = 2 * 2 * size.queries * 5 * 128 + 4 * size.keys + 4 * size.queries * 5 + 4 * (size.requests + 1)
    return Cost(bytes=cache + others, flops=4 * size.pairs * 5 * 128, unit="bf16")
