"""Ways to compute the first problems' results, in torch: right ones that differ from the reference, and wrong ones."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

BF16 = torch.bfloat16


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float, mean: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm of fp32 rows by division, with another mean square if one is given."""
    mean = rows.square().mean(-1, keepdim=True) if mean is None else mean
    return (rows / torch.sqrt(mean + eps) * weight.float()).to(BF16)


def blocked(rows: torch.Tensor) -> torch.Tensor:
    """Mean square by 32 lanes with strided partial sums, then a tree: a warp's order."""
    parts = rows.square().unflatten(-1, (-1, 32)).cumsum(-2)[..., -1, :]
    while parts.shape[-1] > 1:
        parts = parts[..., : parts.shape[-1] // 2] + parts[..., parts.shape[-1] // 2 :]
    return parts / rows.shape[-1]


def sequential(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().cumsum(-1)[..., -1:] / rows.shape[-1]


ADD_NORM_RIGHT = {
    "division": lambda h, r, w: norm(h.float() + r.float(), w, 1e-5),
    "warp order": lambda h, r, w: norm(h.float() + r.float(), w, 1e-5, blocked(h.float() + r.float())),
    "sequential": lambda h, r, w: norm(h.float() + r.float(), w, 1e-5, sequential(h.float() + r.float())),
}
ADD_NORM_WRONG = {
    "no weight": lambda h, r, w: norm(h.float() + r.float(), torch.ones_like(w), 1e-5),
    "no residual": lambda h, r, w: norm(h.float(), w, 1e-5),
    "fp8 result": lambda h, r, w: norm(h.float() + r.float(), w, 1e-5).to(torch.float8_e4m3fn).to(BF16),
    "mean of half the row": lambda h, r, w: norm(
        h.float() + r.float(), w, 1e-5, (h.float() + r.float())[:, :2048].square().mean(-1, keepdim=True)
    ),
    "no reduction at all": lambda h, r, w: ((h.float() + r.float()) / math.sqrt(2) * w.float()).to(BF16),
}
NORM_RIGHT = {
    "division": lambda x, w: norm(x.float(), w, 1e-6),
    "warp order": lambda x, w: norm(x.float(), w, 1e-6, blocked(x.float())),
}
NORM_WRONG = {
    "no weight": lambda x, w: norm(x.float(), torch.ones_like(w), 1e-6),
    "no reduction at all": lambda x, w: (x.float() * w.float()).to(BF16),
    "mean of 120": lambda x, w: norm(x.float(), w, 1e-6, x[:, :120].float().square().mean(-1, keepdim=True)),
}


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    *,
    block: int = 64,
    probabilities: torch.dtype = torch.float32,
    skip_last: bool = False,
    uniform: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Online softmax over blocks of keys in base 2, as kernels do it."""
    batch, heads, dim = q.shape
    group = heads // k_cache.shape[2]
    output, lse = torch.zeros_like(q), torch.full((batch, heads), -math.inf)
    for b, (begin, end) in enumerate(pairwise(kv_indptr.tolist())):
        end -= skip_last and end - begin > 1
        if begin == end:
            continue
        top, total, acc = torch.full((heads,), -math.inf), torch.zeros(heads), torch.zeros(heads, dim)
        for start in range(begin, end, block):
            slots = kv_indices[start : min(start + block, end)]
            keys, values = (c[slots, 0].float().repeat_interleave(group, 1) for c in (k_cache, v_cache))
            logits = torch.einsum("hd,mhd->hm", q[b].float(), keys) * (0 if uniform else sm_scale / math.log(2))
            highest = torch.maximum(top, logits.amax(1))
            p = torch.exp2(logits - highest[:, None])
            total = total * torch.exp2(top - highest) + p.sum(1)
            acc = acc * torch.exp2(top - highest)[:, None]
            acc = acc + torch.einsum("hm,mhd->hd", p.to(probabilities).float(), values)
            top = highest
        output[b], lse[b] = (acc / total[:, None]).to(BF16), top + torch.log2(total)
    return output, lse


def _attention(**options: Any) -> Any:
    return lambda *inputs: attention(*inputs, **options)


DECODE_RIGHT = {
    "blocks of 64": _attention(),
    "blocks of 16, bf16 probabilities": _attention(block=16, probabilities=BF16),
    "bf16 probabilities": _attention(probabilities=BF16),
}
DECODE_WRONG = {
    "last key skipped": _attention(skip_last=True),
    "uniform weights": _attention(uniform=True),
    "fp8 probabilities": _attention(probabilities=torch.float8_e4m3fn),
}
