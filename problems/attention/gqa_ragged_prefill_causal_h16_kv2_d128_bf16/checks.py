"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.attention import variants
from mkb_env.problems.attention.common import ragged_prefill
from mkb_env.problems.attention.variants import INDEPENDENT as INDEPENDENT
from mkb_env.problems.attention.variants import blocked


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's operator, request by request, with rows looked up one by one."""
    q, k, v, qo_indptr, kv_indptr, sm_scale = inputs
    bounds = kv_indptr.tolist()
    queries = list(pairwise(qo_indptr.tolist()))
    variants.check_requests(q, k, v, queries, lambda b: list(range(bounds[b], bounds[b + 1])), sm_scale, truth)


WRONG = {
    "no maximum subtracted": partial(ragged_prefill, attention=blocked(shifted=False)),
    "no more than 64 keys": partial(ragged_prefill, attention=blocked(visible=variants.first_keys(64))),
    "keys found by qo_indptr": lambda q, k, v, qo, kv, scale: ragged_prefill(q, k, v, qo, qo, scale),
    "causal from the first key, without the prefix": partial(
        ragged_prefill, attention=blocked(visible=variants.at_start)
    ),
    "query head h reads key/value head h mod 2": partial(
        ragged_prefill, attention=blocked(head_of=variants.interleaved)
    ),
    "NaN in rows without keys": lambda *inputs: variants.nan_in_empty(ragged_prefill(*inputs)),
    "lse to base e": lambda *inputs: variants.natural_lse(ragged_prefill(*inputs)),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": partial(ragged_prefill, attention=blocked()),
    "blocks of 16 keys, fp32 probabilities": partial(ragged_prefill, attention=blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": partial(ragged_prefill, attention=blocked(16, split=True)),
}
