"""Paged decode attention in TIRx: split over chunks of tokens, then a merge.

A block attends 32 query heads to one chunk of one request, a warp to one key/value head with its 4 query heads, half a
warp to one token, a thread to 8 channels. The softmax is online, in base 2. A request with one chunk has its result
then; the others leave a partial output and log-sum-exp per chunk, which the second kernel merges.

Chunks need no schedule from the host: request b owns the work items from kv_indptr[b] // chunk + b on, a strictly
increasing sequence that leaves room for ceil(length / chunk), at least 1, items.
"""

# mkb-baseline-canary b9d2a8f6-6f0b-4a13-8c3c-3b6f0f7d1e42

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import tvm
from tvm.script import tirx as T

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS  # query heads of one key/value head
VECTOR = 8  # channels of one thread: 16 bytes of a cache row
LANES = HEAD_DIM // VECTOR  # threads of one token
UNROLL = 4  # tokens of a half-warp in flight
TOKENS_AT_ONCE = UNROLL * 32 // LANES
THREADS = 32 * KV_HEADS
MIN_CHUNK, MAX_CHUNK = 32, 256
WORK_ITEMS = 2048  # about 8 waves of blocks on 132 SMs
MERGE_WARPS = 4
LOG2_E = 1.4426950408889634
LOWEST = -1e30  # below every logit, and finite: LOWEST - LOWEST is no NaN


def first_item(kv_indptr: Any, b: Any, chunk: Any) -> Any:
    """The first work item of request ``b``."""
    return T.truncdiv(kv_indptr[b], chunk) + b


def other_half(value: Any) -> Any:
    """``value`` of the same lane in the other half of the warp."""
    return T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, LANES, 32, 32)


@T.prim_func
def split(
    q_ptr: T.handle,
    k_ptr: T.handle,
    v_ptr: T.handle,
    indptr_ptr: T.handle,
    indices_ptr: T.handle,
    output_ptr: T.handle,
    lse_ptr: T.handle,
    partial_output_ptr: T.handle,
    partial_lse_ptr: T.handle,
    sm_scale: T.float32,
    chunk: T.int32,
):
    """Attend one request's queries to one chunk of its tokens."""
    batch, bounds, slots, tokens, items = T.int32(), T.int32(), T.int64(), T.int32(), T.int32()
    q = T.match_buffer(q_ptr, (batch, HEADS, HEAD_DIM), "bfloat16")
    k_cache = T.match_buffer(k_ptr, (slots, KV_HEADS, HEAD_DIM), "bfloat16")
    v_cache = T.match_buffer(v_ptr, (slots, KV_HEADS, HEAD_DIM), "bfloat16")
    kv_indptr = T.match_buffer(indptr_ptr, (bounds,), "int32")
    kv_indices = T.match_buffer(indices_ptr, (tokens,), "int32")
    output = T.match_buffer(output_ptr, (batch, HEADS, HEAD_DIM), "bfloat16")
    lse = T.match_buffer(lse_ptr, (batch, HEADS), "float32")
    partial_output = T.match_buffer(partial_output_ptr, (items, HEADS, HEAD_DIM), "float32")
    partial_lse = T.match_buffer(partial_lse_ptr, (items, HEADS), "float32")
    T.device_entry()
    item = T.cta_id([items])
    thread = T.thread_id([THREADS])
    kv_head: T.let = thread // 32
    half: T.let = thread % 32 // LANES
    lane: T.let = thread % LANES
    listed = T.alloc_shared((MAX_CHUNK,), "int32")
    query = T.alloc_local((GROUP, VECTOR), "float32")
    total = T.alloc_local((GROUP, VECTOR), "float32")
    maximum = T.alloc_local((GROUP,), "float32")
    weight = T.alloc_local((GROUP,), "float32")
    keys = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    logits = T.alloc_local((UNROLL, GROUP), "float32")
    narrow = T.alloc_local((VECTOR,), "bfloat16")
    found = T.alloc_local((1,), "int32")
    slot = T.alloc_local((1,), "int64")
    highest = T.alloc_local((1,), "float32")
    rescale = T.alloc_local((1,), "float32")

    # The last request whose items begin at or before this one, found by the warp together.
    found[0] = 0
    for i in T.serial(T.ceildiv(batch, 32)):
        if i * 32 + thread % 32 < batch and first_item(kv_indptr, i * 32 + thread % 32, chunk) <= item:
            found[0] += 1
    found[0] = T.cuda.warp_sum(found[0]) - 1
    request: T.let = found[0]
    part: T.let = item - first_item(kv_indptr, request, chunk)
    length: T.let = kv_indptr[request + 1] - kv_indptr[request]
    begin: T.let = kv_indptr[request] + part * chunk
    count: T.let = T.min(length - part * chunk, chunk)  # negative: an item that no request needs
    if thread < count:
        listed[thread] = kv_indices[begin + thread]
    T.cuda.cta_sync()

    if count > 0 or part == 0:
        for g in T.unroll(GROUP):
            for c in T.vectorized(VECTOR):
                narrow[c] = q[request, kv_head * GROUP + g, lane * VECTOR + c]
            for c in T.unroll(VECTOR):
                query[g, c] = T.Cast("float32", narrow[c]) * (sm_scale * T.float32(LOG2_E))
                total[g, c] = T.float32(0)
            weight[g] = T.float32(0)
            maximum[g] = T.float32(LOWEST)

        for step in T.serial(T.ceildiv(count, TOKENS_AT_ONCE)):
            first: T.let = step * TOKENS_AT_ONCE + half
            for u in T.unroll(UNROLL):
                # Past the end the last token is read again, and its logit is dropped: unlisted slots may hold NaN.
                slot[0] = T.Cast("int64", listed[T.min(first + 2 * u, count - 1)])
                for c in T.vectorized(VECTOR):
                    keys[u, c] = k_cache[slot[0], kv_head, lane * VECTOR + c]
                for c in T.vectorized(VECTOR):
                    values[u, c] = v_cache[slot[0], kv_head, lane * VECTOR + c]
            for u in T.unroll(UNROLL):
                for g in T.unroll(GROUP):
                    logits[u, g] = T.float32(0)
                    for c in T.unroll(VECTOR):
                        logits[u, g] += T.Cast("float32", keys[u, c]) * query[g, c]
                    logits[u, g] = T.cuda.warp_sum(logits[u, g], LANES)
                    logits[u, g] = T.Select(first + 2 * u < count, logits[u, g], T.float32(-float("inf")))
            for g in T.unroll(GROUP):
                highest[0] = maximum[g]
                for u in T.unroll(UNROLL):
                    highest[0] = T.max(highest[0], logits[u, g])
                rescale[0] = T.exp2(maximum[g] - highest[0])
                maximum[g] = highest[0]
                weight[g] *= rescale[0]
                for c in T.unroll(VECTOR):
                    total[g, c] *= rescale[0]
                for u in T.unroll(UNROLL):
                    logits[u, g] = T.exp2(logits[u, g] - highest[0])
                    weight[g] += logits[u, g]
                    for c in T.unroll(VECTOR):
                        total[g, c] += T.Cast("float32", values[u, c]) * logits[u, g]

        for g in T.unroll(GROUP):
            highest[0] = T.cuda.warp_max(maximum[g])
            rescale[0] = T.exp2(maximum[g] - highest[0])
            weight[g] *= rescale[0]
            weight[g] += other_half(weight[g])
            for c in T.unroll(VECTOR):
                total[g, c] *= rescale[0]
                total[g, c] += other_half(total[g, c])
                total[g, c] = T.Select(weight[g] > T.float32(0), total[g, c] / weight[g], T.float32(0))
                narrow[c] = T.Cast("bfloat16", total[g, c])
            highest[0] = T.Select(weight[g] > T.float32(0), highest[0] + T.log2(weight[g]), T.float32(-float("inf")))
            if half == 0:
                if length <= chunk:
                    for c in T.vectorized(VECTOR):
                        output[request, kv_head * GROUP + g, lane * VECTOR + c] = narrow[c]
                    if lane == 0:
                        lse[request, kv_head * GROUP + g] = highest[0]
                else:
                    for c in T.unroll(VECTOR // 4):
                        for d in T.vectorized(4):
                            partial_output[T.Cast("int64", item), kv_head * GROUP + g, lane * VECTOR + c * 4 + d] = (
                                total[g, c * 4 + d]
                            )
                    if lane == 0:
                        partial_lse[item, kv_head * GROUP + g] = highest[0]


@T.prim_func
def merge(
    indptr_ptr: T.handle,
    partial_output_ptr: T.handle,
    partial_lse_ptr: T.handle,
    output_ptr: T.handle,
    lse_ptr: T.handle,
    chunk: T.int32,
):
    """Merge the partial results of one request and head, if there are several."""
    batch, bounds, items = T.int32(), T.int32(), T.int32()
    kv_indptr = T.match_buffer(indptr_ptr, (bounds,), "int32")
    partial_output = T.match_buffer(partial_output_ptr, (items, HEADS, HEAD_DIM), "float32")
    partial_lse = T.match_buffer(partial_lse_ptr, (items, HEADS), "float32")
    output = T.match_buffer(output_ptr, (batch, HEADS, HEAD_DIM), "bfloat16")
    lse = T.match_buffer(lse_ptr, (batch, HEADS), "float32")
    T.device_entry()
    head, request = T.cta_id([HEADS, batch])
    thread = T.thread_id([HEAD_DIM])
    warp: T.let = thread // 32
    lane: T.let = thread % 32
    sums = T.alloc_shared((MERGE_WARPS, HEAD_DIM), "float32")
    own = T.alloc_local((4,), "float32")
    part = T.alloc_local((4,), "float32")
    highest = T.alloc_local((1,), "float32")
    weight = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    merged = T.alloc_local((1,), "float32")

    length: T.let = kv_indptr[request + 1] - kv_indptr[request]
    if length > chunk:
        begin: T.let = first_item(kv_indptr, request, chunk)
        parts: T.let = T.truncdiv(length + chunk - 1, chunk)
        highest[0] = T.float32(LOWEST)
        for i in T.serial(T.ceildiv(parts - lane, 32)):
            highest[0] = T.max(highest[0], partial_lse[begin + lane + i * 32, head])
        highest[0] = T.cuda.warp_max(highest[0])
        weight[0] = T.float32(0)
        for i in T.serial(T.ceildiv(parts - lane, 32)):
            weight[0] += T.exp2(partial_lse[begin + lane + i * 32, head] - highest[0])
        weight[0] = T.cuda.warp_sum(weight[0])

        # Each warp sums every MERGE_WARPS-th part, each thread 4 channels of it; then a thread sums its own channel.
        for c in T.unroll(4):
            own[c] = T.float32(0)
        for i in T.serial(T.ceildiv(parts - warp, MERGE_WARPS)):
            item: T.let = begin + warp + i * MERGE_WARPS
            scale[0] = T.exp2(partial_lse[item, head] - highest[0])
            for c in T.vectorized(4):
                part[c] = partial_output[T.Cast("int64", item), head, lane * 4 + c]
            for c in T.unroll(4):
                own[c] += part[c] * scale[0]
        for c in T.vectorized(4):
            sums[warp, lane * 4 + c] = own[c]
        T.cuda.cta_sync()
        merged[0] = T.float32(0)
        for w in T.unroll(MERGE_WARPS):
            merged[0] += sums[w, thread]
        output[request, head, thread] = T.Cast("bfloat16", merged[0] / weight[0])
        if thread == 0:
            lse[request, head] = highest[0] + T.log2(weight[0])


@cache
def compiled() -> Any:
    """Both kernels, for any batch, cache size and number of tokens."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    return tvm.compile(tvm.IRModule({"split": split, "merge": merge}), target=target, tir_pipeline="tirx")


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [B, 32, 128], caches [P, 1, 8, 128] bf16, int32 indices -> ``output`` bf16, ``lse`` [B, 32] fp32."""
    batch, tokens = q.shape[0], kv_indices.shape[0]
    chunk = MIN_CHUNK
    while chunk < MAX_CHUNK and tokens > chunk * WORK_ITEMS:
        chunk *= 2
    items = tokens // chunk + batch
    output = torch.empty_like(q)
    lse = torch.empty(batch, HEADS, dtype=torch.float32, device=q.device)
    partial_output = torch.empty(items, HEADS, HEAD_DIM, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(items, HEADS, dtype=torch.float32, device=q.device)
    k_rows, v_rows = (cache.view(-1, KV_HEADS, HEAD_DIM) for cache in (k_cache, v_cache))
    kernels = compiled()
    kernels["split"](
        q, k_rows, v_rows, kv_indptr, kv_indices, output, lse, partial_output, partial_lse, sm_scale, chunk
    )
    if tokens > chunk:
        kernels["merge"](kv_indptr, partial_output, partial_lse, output, lse, chunk)
    return output, lse
