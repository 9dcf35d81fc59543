"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.attention import variants
from mkb_env.problems.attention.gqa_paged_decode_h32_kv8_d128_ps64_bf16.problem import reference
from mkb_env.problems.attention.variants import INDEPENDENT as INDEPENDENT
from mkb_env.problems.attention.variants import blocked


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's operator, request by request, with rows looked up one by one."""
    q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale = inputs
    queries = [(b, b + 1) for b in range(len(q))]
    rows_of = variants.paged_rows(kv_indptr, kv_indices, 64, kv_last_page_len)
    keys, values = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    variants.check_requests(q, keys, values, queries, rows_of, sm_scale, truth)


def _heads_first(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1, 8, 64, 128).transpose(1, 2)


WRONG = {
    "no maximum subtracted": partial(reference, attention=blocked(shifted=False)),
    "whole last pages": variants.altered(reference, lambda last: torch.full_like(last, 64), 5),
    "a full last page counts as empty": variants.altered(reference, lambda last: last % 64, 5),
    "the last key left out": partial(reference, attention=blocked(visible=variants.without_own)),
    "pages laid out as [head, row]": variants.altered(reference, _heads_first, 1, 2),
    "lse to base e": lambda *inputs: variants.natural_lse(reference(*inputs)),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": partial(reference, attention=blocked()),
    "blocks of 16 keys, fp32 probabilities": partial(reference, attention=blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": partial(reference, attention=blocked(16, split=True)),
}
