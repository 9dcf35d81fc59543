"""Attention of one new token per request over a paged key/value cache with one token per page (Llama-3.1-8B decode).

There are B requests, 32 query heads, 8 key/value heads, 128 channels per head, P cache slots and N listed slots in all.

Inputs, contiguous and row-major:
  q           [B, 32, 128]    bfloat16  one query token per request, already rotated
  k_cache     [P, 1, 8, 128]  bfloat16  keys by slot
  v_cache     [P, 1, 8, 128]  bfloat16  values by slot
  kv_indptr   [B + 1]         int32     0 = kv_indptr[0] <= kv_indptr[1] <= ... <= kv_indptr[B] = N
  kv_indices  [N]             int32     slots in [0, P); request b lists kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
  sm_scale    float                     factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output      [B, 32, 128]    bfloat16
  lse         [B, 32]         float32

For request b with m = kv_indptr[b + 1] - kv_indptr[b] slots s_0 ... s_{m-1}, and query head h, which reads key/value
head g = h // 4, in float32:
  l_j = dot(q[b, h], k_cache[s_j, 0, g]) * sm_scale
  lse[b, h] = log2(sum_j exp(l_j))                  (base 2 of the natural sum: logsumexp(l) / ln 2)
  output[b, h] = sum_j softmax(l)_j * v_cache[s_j, 0, g], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- Every listed slot is visible; there is no causal mask.
- A request with m = 0 has output 0 and lse -inf, not NaN.
- Slots appear in no particular order. Requests may share slots.
- Cache slots that no request lists may hold anything, NaN included, and must not influence the result.
- kv_indptr is fixed by the workload and its values are visible to host code; kv_indices is not.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, offsets, permutation

TITLE = "Paged decode attention, 32 query heads on 8 key/value heads, page size 1"
NUMBER = 1
MODEL = "Llama-3.1-8B"
INPUTS = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("kv_indptr",)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SM_SCALE = HEAD_DIM**-0.5
WORKLOADS = {
    "full": {
        "lengths": [512 + 17 * b for b in range(56)] + [1543, 2050, 2311, 2596, 2881, 3096, 4001, 6000],
        "P": 98304,
        "sm_scale": SM_SCALE,
        "poison": True,
    },
    "small": {"lengths": [17, 0, 40, 1], "P": 64, "sm_scale": SM_SCALE, "poison": True},
    "heldout": [
        {"lengths": [1 + 97 * b % 1511 for b in range(17)], "P": 16384, "sm_scale": SM_SCALE, "shared_prefix": 64},
        {"lengths": [0, 1, 8191, 129, 0], "P": 9000, "sm_scale": 0.1, "poison": True},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each request's slots begin."""
    return {"kv_indptr": offsets(shape["lengths"])}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    batch, tokens = len(shape["lengths"]), sum(shape["lengths"])
    cache = (shape["P"], 1, KV_HEADS, HEAD_DIM), torch.bfloat16
    return (
        ((batch, HEADS, HEAD_DIM), torch.bfloat16),
        cache,
        cache,
        ((batch + 1,), torch.int32),
        ((tokens,), torch.int32),
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    batch = len(shape["lengths"])
    return ((batch, HEADS, HEAD_DIM), torch.bfloat16), ((batch, HEADS), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Standard normal queries and cache, a random placement of tokens in slots, in ``INPUTS``' order.

    With ``shared_prefix`` = s, all requests longer than s have the first s slots of the first such request. With
    ``poison``, slots that no request lists hold NaN.
    """
    lengths, slots = shape["lengths"], shape["P"]
    q = normal(generator, len(lengths), HEADS, HEAD_DIM, dtype=torch.bfloat16)
    k_cache, v_cache = (normal(generator, slots, 1, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    placement = permutation(generator, slots)
    kv_indptr = torch.tensor(geometry(shape)["kv_indptr"], dtype=torch.int32, device=generator.device)
    kv_indices = placement[: sum(lengths)].clone()
    sharing, prefix = _sharing(shape), shape.get("shared_prefix", 0)
    for begin in sharing[1:]:
        kv_indices[begin : begin + prefix] = kv_indices[sharing[0] : sharing[0] + prefix]
    if shape.get("poison"):
        unused = placement[sum(lengths) :]
        k_cache[unused], v_cache[unused] = math.nan, math.nan
    return q, k_cache, v_cache, kv_indptr, kv_indices, shape["sm_scale"]


def _sharing(shape: Shape) -> list[int]:
    """Where the slots of the requests with the shared prefix begin in ``kv_indices``; empty without such a prefix."""
    prefix, lengths = shape.get("shared_prefix", 0), shape["lengths"]
    return [sum(lengths[:b]) for b, length in enumerate(lengths) if length > prefix > 0]


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula, request by request; float64 inputs are computed in float64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    output = torch.zeros_like(q)
    lse = torch.full((batch, heads), -math.inf, dtype=wide, device=q.device)
    for b, (begin, end) in enumerate(pairwise(kv_indptr.tolist())):
        if begin == end:
            continue
        slots = kv_indices[begin:end]
        keys, values = k_cache[slots, 0].to(wide), v_cache[slots, 0].to(wide)
        queries = q[b].to(wide).view(kv_heads, heads // kv_heads, dim)
        logits = torch.einsum("hgd,mhd->hgm", queries, keys) * sm_scale
        lse[b] = torch.logsumexp(logits, dim=-1).view(heads) / math.log(2)
        output[b] = torch.einsum("hgm,mhd->hgd", logits.softmax(dim=-1), values).reshape(heads, dim)
    return output, lse


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Allowed absolute error: 1.6e-2 (|x| + rms of x over its head) for ``output``, 2e-3 for ``lse``.

    The first admits probabilities rounded to bfloat16 at any length: m nearly uniform keys give an output of rms
    sqrt(e / m), so a fixed absolute term would accept zeros. Outputs of empty requests must be exactly 0.
    """
    if name == "lse":
        return torch.full_like(anchor, 2e-3)
    return 1.6e-2 * (anchor.abs() + anchor.square().mean(dim=-1, keepdim=True).sqrt())


def COST(shape: Shape) -> Cost:
    """Every listed slot's key and value once, queries, indices and outputs once; two multiply-adds per key channel."""
    batch, tokens = len(shape["lengths"]), sum(shape["lengths"])
    distinct = tokens - shape.get("shared_prefix", 0) * max(0, len(_sharing(shape)) - 1)
    cache = 2 * 2 * distinct * KV_HEADS * HEAD_DIM
    others = 2 * 2 * batch * HEADS * HEAD_DIM + 4 * tokens + 4 * batch * HEADS + 4 * (batch + 1)
    return Cost(bytes=cache + others, flops=4 * tokens * HEADS * HEAD_DIM, unit="bf16")
