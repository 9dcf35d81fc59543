"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.attention import variants
from mkb_env.problems.attention.mla_paged_decode_h16_ckv512_kpe64_ps1_bf16.problem import reference
from mkb_env.problems.attention.variants import INDEPENDENT as INDEPENDENT
from mkb_env.problems.attention.variants import blocked


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's operator, request by request, with rows looked up one by one."""
    q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale = inputs
    q, keys = torch.cat((q_nope, q_pe), dim=-1), torch.cat((ckv_cache, kpe_cache), dim=-1)
    queries, rows_of = [(b, b + 1) for b in range(len(q))], variants.paged_rows(kv_indptr, kv_indices)
    variants.check_requests(q, keys, ckv_cache, queries, rows_of, sm_scale, truth)


WRONG = {
    "no maximum subtracted": partial(reference, attention=blocked(shifted=False)),
    "no rotary channels in the logits": variants.altered(reference, torch.zeros_like, 1),
    "scale of 576 channels": variants.altered(reference, lambda _: 576**-0.5, -1),
    "the last key left out": partial(reference, attention=blocked(visible=variants.without_own)),
    "partial results merged by e to their base-2 lse": partial(
        reference, attention=blocked(16, split=True, merge=torch.exp)
    ),
    "lse to base e": lambda *inputs: variants.natural_lse(reference(*inputs)),
}
SECOND = {
    "blocks of 64 keys, bf16 probabilities": partial(reference, attention=blocked()),
    "blocks of 16 keys, fp32 probabilities": partial(reference, attention=blocked(16, torch.float32)),
    "split over blocks of 16 keys, merged by lse": partial(reference, attention=blocked(16, split=True)),
}
