"""Causal attention with 192 channels in queries and keys and 128 in values (DeepSeek-V3 prefill, not absorbed).

There are B requests with Tq query tokens and Tk key tokens in all and 16 heads. Queries and keys have 192 channels per
head (128 without position and 64 rotary ones, concatenated), values and outputs 128.

Inputs, contiguous and row-major:
  q          [Tq, 16, 192]  bfloat16  queries of all requests, one request after another, already rotated
  k          [Tk, 16, 192]  bfloat16  keys of all requests, one request after another, already rotated
  v          [Tk, 16, 128]  bfloat16  values of the same tokens
  qo_indptr  [B + 1]        int32     0 = qo_indptr[0] <= ... <= qo_indptr[B] = Tq
  kv_indptr  [B + 1]        int32     0 = kv_indptr[0] <= ... <= kv_indptr[B] = Tk
  sm_scale   float                    factor of the logits

Outputs, a tuple in this order, contiguous and row-major:
  output  [Tq, 16, 128]  bfloat16
  lse     [Tq, 16]       float32

For request b with n = qo_indptr[b + 1] - qo_indptr[b] queries and m = kv_indptr[b + 1] - kv_indptr[b] keys, query i = 0
... n - 1 in row t = qo_indptr[b] + i, key j in row s_j = kv_indptr[b] + j, and query head h, which reads its own keys
and values, in float32:
  l_j = dot(q[t, h], k[s_j, h]) * sm_scale    for the visible keys, j <= i + (m - n)
  lse[t, h] = log2(sum_j exp(l_j))            (that is logsumexp(l) / ln 2; exp is to base e)
  output[t, h] = sum_j softmax(l)_j * v[s_j, h], rounded once to bfloat16

Numerics: inputs are widened to float32; dot products, softmax (with the maximum subtracted) and the weighted sum are
accumulated in float32. Probabilities rounded to bfloat16 are within the tolerance.

Rules:
- The causal rule is aligned at the end: the last query of a request sees all of its m keys; m - n is the length of the
  prefix before the new tokens, and may be negative.
- Queries that see no key have output 0 and lse -inf, not NaN: with n > m these are the first n - m queries of a
  request, with m = 0 all of them.
- n, m, or both may be 0. A request with n = 0 has no row in the outputs, but may well have keys.
- A query never sees a key of another request.
- sm_scale is an argument and need not be 1 / sqrt(192).
- qo_indptr and kv_indptr are fixed by the workload and their values are visible to host code.
- Logits may be several hundred in size.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from mkb_env.problems.attention.common import counts, draw_inputs, layout, ragged_prefill, softmax_allowance
from mkb_env.problems.contract import Cost, Shape, Spec

TITLE = "Causal ragged prefill, 16 heads, 192 channels in queries and keys and 128 in values"
NUMBER = 16
MODEL = "DeepSeek-V3, tensor parallelism 8"
INPUTS = ("q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale")
OUTPUTS = ("output", "lse")
HOST_VISIBLE = ("qo_indptr", "kv_indptr")
SM_SCALE = 0.1352337788608801
"""192^-0.5 (0.1 ln 40 + 1)^2: the second factor belongs to the model's scaling of positions."""
OTHER_SCALE = 128**-0.5
"""Not the model's own: the argument counts."""
QUERIES = [*(40 + 23 * b % 64 for b in range(56)), *(200 + 100 * i for i in range(8))]
"""Of the requests of ``full``."""
WORKLOADS = {
    "full": {
        "requests": [
            *([n, n + 256 * (b % 2) + 13 * b % 31] for b, n in enumerate(QUERIES)),
            *([0, 0], [0, 100], [6, 2], [2, 0]),
        ],
        "loud": [8, 64],
        "sm_scale": SM_SCALE,
    },
    "small": {
        "requests": [[9, 15], [4, 4], [0, 3], [6, 2], [0, 0], [2, 0], [2, 83]],
        "loud": [4, 64],
        "sm_scale": OTHER_SCALE,
    },
    "heldout": [
        {
            "requests": [[39, 295], [1, 1], [0, 100], [513, 513], [65, 1000]],
            "sm_scale": OTHER_SCALE,
        },
        {"requests": [[0, 0], [1025, 1030], [6, 2], [127, 383], [64, 64]], "sm_scale": SM_SCALE},
        {"requests": [[2, 0], [23, 31], [5, 1], [0, 3], [6, 6], [3, 93]], "loud": [5, 64], "sm_scale": SM_SCALE},
    ],
}


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each request's queries and keys begin."""
    return {name: layout(shape)[name] for name in HOST_VISIBLE}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    size = counts(shape)
    bounds = (size.requests + 1,), torch.int32
    return (
        ((size.queries, 16, 192), torch.bfloat16),
        ((size.keys, 16, 192), torch.bfloat16),
        ((size.keys, 16, 128), torch.bfloat16),
        bounds,
        bounds,
        shape["sm_scale"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    queries = counts(shape).queries
    return ((queries, 16, 128), torch.bfloat16), ((queries, 16), torch.float32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Standard normal queries, keys and values, in ``INPUTS``' order."""
    return draw_inputs(generator, shape, INPUTS, input_specs(shape))


reference = ragged_prefill
allowance = softmax_allowance


def COST(shape: Shape) -> Cost:
    """Visible keys and values, queries and outputs cross memory once; two multiply-adds per visible pair, channel and
    head.
    """
    size = counts(shape)
    rows = 2 * size.read * 16 * 320 + 2 * size.queries * 16 * 320
    others = 4 * size.queries * 16 + 8 * (size.requests + 1)
    return Cost(bytes=rows + others, flops=2 * size.pairs * 16 * 320, unit="bf16")
