"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.attention import variants
from mkb_env.problems.attention.common import paged_decode
from mkb_env.problems.attention.variants import INDEPENDENT as INDEPENDENT
from mkb_env.problems.attention.variants import blocked


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's operator, request by request, with rows looked up one by one."""
    q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale = inputs
    queries = [(b, b + 1) for b in range(len(q))]
    rows_of = variants.paged_rows(kv_indptr, kv_indices)
    variants.check_requests(q, k_cache[:, 0], v_cache[:, 0], queries, rows_of, sm_scale, truth)


WRONG = {
    "no maximum subtracted": partial(paged_decode, attention=blocked(shifted=False)),
    "the last key left out": partial(paged_decode, attention=blocked(visible=variants.without_own)),
    "the keys after the last whole tile of 32 left out": partial(
        paged_decode, attention=blocked(visible=variants.whole_tiles(32))
    ),
    "partial results merged by e to their base-2 lse": partial(
        paged_decode, attention=blocked(16, split=True, merge=torch.exp)
    ),
    "powers of 2 of logits not divided by ln 2": variants.with_scale(paged_decode, variants.LN_2),
    "lse to base e": lambda *inputs: variants.natural_lse(paged_decode(*inputs)),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": partial(paged_decode, attention=blocked()),
    "blocks of 16 keys, fp32 probabilities": partial(paged_decode, attention=blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": partial(paged_decode, attention=blocked(16, split=True)),
}
