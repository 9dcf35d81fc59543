"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.attention import variants
from mkb_env.problems.attention.common import paged_prefill
from mkb_env.problems.attention.variants import INDEPENDENT as INDEPENDENT
from mkb_env.problems.attention.variants import blocked


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's operator, request by request, with rows looked up one by one."""
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, sm_scale = inputs
    queries, rows_of = list(pairwise(qo_indptr.tolist())), variants.paged_rows(kv_indptr, kv_indices)
    variants.check_requests(q, k_cache[:, 0], v_cache[:, 0], queries, rows_of, sm_scale, truth)


WRONG = {
    "no maximum subtracted": partial(paged_prefill, attention=blocked(shifted=False)),
    "causal from the first key, without the prefix": partial(
        paged_prefill, attention=blocked(visible=variants.at_start)
    ),
    "the diagonal left out": partial(paged_prefill, attention=blocked(visible=variants.without_own)),
    "no mask": partial(paged_prefill, attention=blocked(visible=variants.with_all)),
    "query head h reads key/value head h mod 8": partial(
        paged_prefill, attention=blocked(head_of=variants.interleaved)
    ),
    "NaN in rows without keys": lambda *inputs: variants.nan_in_empty(paged_prefill(*inputs)),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": partial(paged_prefill, attention=blocked()),
    "blocks of 16 keys, fp32 probabilities": partial(paged_prefill, attention=blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": partial(paged_prefill, attention=blocked(16, split=True)),
}
