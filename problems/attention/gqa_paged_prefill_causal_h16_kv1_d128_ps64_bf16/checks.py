"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.attention import variants
from mkb_env.problems.attention.common import page_prefill
from mkb_env.problems.attention.variants import INDEPENDENT as INDEPENDENT
from mkb_env.problems.attention.variants import blocked


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's operator, request by request, with rows looked up one by one."""
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale = inputs
    queries = list(pairwise(qo_indptr.tolist()))
    rows_of = variants.paged_rows(kv_indptr, kv_indices, 64, kv_last_page_len)
    keys, values = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    variants.check_requests(q, keys, values, queries, rows_of, sm_scale, truth)


WRONG = {
    "no maximum subtracted": partial(page_prefill, attention=blocked(shifted=False)),
    "the diagonal ends at the last page's end": partial(page_prefill, attention=blocked(visible=variants.in_pages(64))),
    "the diagonal left out": partial(page_prefill, attention=blocked(visible=variants.without_own)),
    "a full last page counts as empty": variants.altered(page_prefill, lambda last: last % 64, 6),
    "powers of 2 of logits not divided by ln 2": variants.with_scale(page_prefill, variants.LN_2),
    "partial results merged by e to their base-2 lse": partial(
        page_prefill, attention=blocked(16, split=True, merge=torch.exp)
    ),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": partial(page_prefill, attention=blocked()),
    "blocks of 16 keys, fp32 probabilities": partial(page_prefill, attention=blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": partial(page_prefill, attention=blocked(16, split=True)),
}
