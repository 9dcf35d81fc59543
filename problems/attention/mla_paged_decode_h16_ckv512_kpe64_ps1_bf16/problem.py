"""Absorbed latent attention of one new token per request over a paged latent cache (DeepSeek-V3 decode).

There are B requests, 16 heads, 512 latent and 64 rotary channels, P cache slots (pages of one token) and N listed slots
in all.

Inputs, contiguous and row-major:
  q_nope      [B, 16, 512]  bfloat16  queries in the latent space (already multiplied by the key matrix)
  q_pe        [B, 16, 64]   bfloat16  rotary channels of the queries, already rotated
  ckv_cache   [P, 1, 512]   bfloat16  latent rows by slot: keys and values at once
  kpe_cache   [P, 1, 64]    bfloat16  rotary channels of the keys by slot, already rotated
  kv_indptr   [B + 1]       int32     0 = kv_indptr[0] <= kv_indptr[1] <= ... <= kv_indptr[B] = N
  kv_indices  [N]           int32     slots in [0, P); request b lists kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
  sm_scale    float                   factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [B, 16, 512]  bfloat16  in the latent space (not yet multiplied by the value matrix)
  lse     [B, 16]       float32

For request b with m = kv_indptr[b + 1] - kv_indptr[b] slots s_0 ... s_{m-1}, and head h, in float32:
  l_j = (dot(q_nope[b, h], ckv_cache[s_j, 0]) + dot(q_pe[b, h], kpe_cache[s_j, 0])) * sm_scale
  lse[b, h] = log2(sum_j exp(l_j))                     (that is logsumexp(l) / ln 2; exp is to base e)
  output[b, h] = sum_j softmax(l)_j * ckv_cache[s_j, 0], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- All 16 heads share the rows of the caches.
- Every listed slot is visible; there is no causal mask.
- A request with m = 0 has output 0 and lse -inf, not NaN.
- Slots appear in no particular order. Requests may share slots. The slots of one request are all different.
- Cache slots that no request lists may hold anything, NaN included, and must not influence the result.
- sm_scale is an argument: it follows from the model's heads before they were absorbed, not from 512 or 576 channels.
- kv_indptr is fixed by the workload and its values are visible to host code; kv_indices is not.
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

TITLE = "Paged decode, absorbed latent attention, 16 heads, page size 1"
NUMBER = 14
MODEL = "DeepSeek-V3, tensor parallelism 8"
INPUTS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_indptr", "kv_indices", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("kv_indptr",)
SM_SCALE = 0.1352337788608801
"""192^-0.5 (0.1 ln 40 + 1)^2: 192 channels before absorption; the model's scaling of positions."""
WORKLOADS = {
    "full": {
        "lengths": [
            *(512 + 31 * b for b in range(48)),
            0,
            *(1600 + 217 * i for i in range(12)),
            *(3299, 5000, 7001, 9197),
        ],
        "P": 131072,
        "loud": [2, 16],
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "small": {"lengths": [19, 33, 0, 1], "P": 64, "loud": [1, 16], "sm_scale": SM_SCALE, "poison": True},
    "heldout": [
        {"lengths": [1 + 613 * b % 4099 for b in range(11)], "P": 32768, "sm_scale": SM_SCALE, "shared_prefix": 128},
        {"lengths": [0, 12345, 63, 1], "P": 13000, "sm_scale": 192**-0.5, "poison": True},
        {"lengths": [37, 0, 70, 2, 3], "P": 131, "loud": [1, 32], "sm_scale": 192**-0.5, "poison": True},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each request's slots begin."""
    return {"kv_indptr": layout(shape)["kv_indptr"]}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    size = counts(shape)
    bounds = (size.requests + 1,), torch.int32
    return (
        ((size.requests, 16, 512), torch.bfloat16),
        ((size.requests, 16, 64), torch.bfloat16),
        ((shape["P"], 1, 512), torch.bfloat16),
        ((shape["P"], 1, 64), torch.bfloat16),
        bounds,
        ((size.keys,), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    queries = len(shape["lengths"])
    return ((queries, 16, 512), torch.bfloat16), ((queries, 16), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal queries and cache, a random placement of tokens in slots, in ``INPUTS``' order.

    With ``shared_prefix`` = s, all requests longer than s have the first s slots of the first such request. With
    ``poison``, slots that no request lists hold NaN.
    """
    return draw_inputs(generator, shape, INPUTS, input_specs(shape))


def reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    attention: Attend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    q, keys = torch.cat((q_nope, q_pe), dim=-1), torch.cat((ckv_cache, kpe_cache), dim=-1)
    requests, rows = paged(singles(len(q)), kv_indptr, kv_indices)
    return attend_requests(q, keys, ckv_cache, requests, sm_scale, attention, rows)


allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Listed slots, queries, indices and outputs cross memory once; a row of 576 keys and 512 values per pair and
    head.
    """
    size = counts(shape)
    rows = 2 * 576 * size.read + 2 * size.queries * 16 * (576 + 512)
    others = 4 * size.keys + 4 * size.queries * 16 + 4 * (size.requests + 1)
    return Cost(bytes=rows + others, flops=2 * size.pairs * 16 * (576 + 512), unit="bf16")
