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


def _half(q: torch.Tensor) -> torch.Tensor:
    return torch.cat((q[..., :128], torch.zeros_like(q[..., 128:])), dim=-1)


WRONG = {
    "no maximum subtracted": partial(ragged_prefill, attention=blocked(shifted=False)),
    "no more than 64 keys": partial(ragged_prefill, attention=blocked(visible=variants.first_keys(64))),
    "half of the channels in the logits": variants.altered(ragged_prefill, _half, 0),
    "the diagonal one key too far": partial(ragged_prefill, attention=blocked(visible=variants.with_next)),
    "causal from the first key, without the prefix": partial(
        ragged_prefill, attention=blocked(visible=variants.at_start)
    ),
    "probabilities in fp8": partial(ragged_prefill, attention=blocked(probabilities=torch.float8_e4m3fn)),
    "powers of 2 of logits not divided by ln 2": variants.with_scale(ragged_prefill, variants.LN_2),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": partial(ragged_prefill, attention=blocked()),
    "blocks of 16 keys, fp32 probabilities": partial(ragged_prefill, attention=blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": partial(ragged_prefill, attention=blocked(16, split=True)),
}
