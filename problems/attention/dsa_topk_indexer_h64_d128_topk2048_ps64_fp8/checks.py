"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mkb_env.problems.attention.dsa_topk_indexer_h64_d128_topk2048_ps64_fp8 import problem
from mkb_env.problems.attention.variants import altered

INDEPENDENT = "numpy in float64 from the cache's bytes and a table of all fp8 codes, one request after another"


def _codes() -> np.ndarray:
    """The value of every e4m3 code: sign, four exponent bits of bias 7, three fraction bits; 127 and 255 are NaN."""
    values = []
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)
        values.append(math.nan if code & 127 == 127 else math.copysign(size, -1 if code > 127 else 1))
    return np.array(values)


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """All requests, with pages looked up one by one; the gap between selected and other scores, too."""
    q, cache, weights, seq_lens, block_table, topk = inputs
    table, page_bytes = _codes(), cache.cpu().numpy().reshape(len(cache), 8448).view(np.uint8)
    queries = table[q.view(torch.uint8).cpu().numpy()]
    for b, (length, row) in enumerate(zip(seq_lens.tolist(), block_table.tolist(), strict=True)):
        pages = row[: (length + 63) // 64]
        keys = [table[page_bytes[page, :8192]].reshape(64, 128) for page in pages]
        scales = [np.frombuffer(page_bytes[page, 8192:].tobytes(), dtype="<f4") for page in pages]
        slots = [64 * page + at for page in pages for at in range(64)][:length]
        score = np.zeros(length)
        if length:
            scaled = np.concatenate(keys)[:length] * np.concatenate(scales)[:length, None].astype(np.float64)
            score = weights[b].double().cpu().numpy() @ np.maximum(queries[b] @ scaled.T, 0)
        ranked = sorted(range(length), key=lambda t: -score[t])
        want = [slots[t] for t in sorted(ranked[:topk])]
        assert truth[0][b].tolist() == want + [-1] * (topk - len(want)), f"request {b}"
        if length > topk:
            gap = score[ranked[topk - 1]] - score[ranked[topk]]
            assert gap > 2 * problem.MARGIN - 1e-3, f"request {b} has a gap of {gap}"


def _bits14(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products as of fp8 tensor cores: 32 channels at a time, the sum cut to 14 bits after each."""
    total = q.new_zeros(*q.shape[:2], keys.shape[1])
    for begin in range(0, q.shape[2], 32):
        part = slice(begin, begin + 32)
        total += q[..., part] @ keys[..., part].mT
        total = (total.view(torch.int32) & -(1 << 10)).view(torch.float32)
    return total


def _by_threshold(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda q, keys: q @ keys.mT,
    fault: str = "",
) -> torch.Tensor:
    """Scales after the sum over heads; a bisection of order-preserving integers finds the border of the selection."""
    values, scales = problem.unpack(cache)
    if fault == "layout":
        rows = cache.view(-1, 64, 132)
        values = rows[..., :128].contiguous().view(torch.float8_e4m3fn).flatten(1)
        scales = rows[..., 128:].contiguous().view(torch.float32).flatten(1).nan_to_num(1.0, 1.0, 1.0)
    keys = values.view(-1, 64, 128).to(torch.bfloat16).float()[block_table].flatten(1, 2)
    heads = products(q.to(torch.bfloat16).float(), keys)
    sums = (heads * weights[..., None]).sum(1).relu() if fault == "relu" else (heads.relu() * weights[..., None]).sum(1)
    if fault != "scale":
        sums = sums * scales[block_table].flatten(1)
    position = torch.arange(sums.shape[1], device=q.device)
    visible = position < seq_lens[:, None]
    bits = sums.view(torch.int32)
    order = torch.where(visible, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long(), -(1 << 40))
    low, high = (torch.full_like(seq_lens, edge, dtype=torch.int64) for edge in (-(1 << 32), 1 << 32))
    for _ in range(34):
        middle = (low + high) >> 1
        enough = (order >= middle[:, None]).sum(1) >= topk
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return problem.slots_of(visible & (order >= low[:, None]), block_table, topk)


def _by_score(*inputs: Any) -> torch.Tensor:
    """Slots in the order of the scores."""
    q, cache, weights, seq_lens, block_table, topk = inputs
    scored = problem.scores(q.float(), *problem.unpack(cache), weights, seq_lens, block_table)
    score, position = scored.topk(topk, dim=1)
    pages = block_table.gather(1, position // 64)
    return torch.where(score > -math.inf, pages * 64 + position % 64, -1).to(torch.int32)


def _logical(*inputs: Any) -> torch.Tensor:
    """Logical positions instead of slots."""
    table = torch.arange(inputs[4].shape[1], device=inputs[4].device, dtype=torch.int32)
    q, cache, weights, seq_lens, block_table, topk = inputs
    scored = problem.scores(q.float(), *problem.unpack(cache), weights, seq_lens, block_table)
    border = scored.topk(topk, dim=1).values[:, -1:]
    return problem.slots_of((scored >= border) & (scored > -math.inf), table.expand_as(block_table), topk)


def _one_less(*inputs: Any) -> torch.Tensor:
    """The border is not part of the selection."""
    fewer = altered(problem.reference, lambda topk: topk - 1, 5)(*inputs)
    return torch.nn.functional.pad(fewer, (0, 1), value=-1)


WRONG = {
    "the heads summed before the negative part is dropped": partial(_by_threshold, fault="relu"),
    "no scales": partial(_by_threshold, fault="scale"),
    "a scale after each token's 128 bytes": partial(_by_threshold, fault="layout"),
    "slots in the order of the scores": _by_score,
    "logical positions instead of slots": _logical,
    "weights without their sign": altered(problem.reference, torch.abs, 2),
    "one token too few": _one_less,
}
SECOND = {
    "bf16 operands, scales after the sum, border by bisection": _by_threshold,
    "products accumulated in 14 bits": partial(_by_threshold, products=_bits14),
}
