"""Paged decode attention in CuTe DSL: split over chunks of tokens, then a merge.

A block attends 32 query heads to one chunk of one request, a warp to one key/value head with its 4 query heads, half a
warp to one token, a thread to 8 channels. The softmax is online, in base 2. A request with one chunk has its result
then; the others leave a partial output and log-sum-exp per chunk, which the second kernel merges.

Chunks need no schedule from the host: request b owns the work items from kv_indptr[b] // chunk + b on, a strictly
increasing sequence that leaves room for ceil(length / chunk), at least 1, items.
"""

# mkb-baseline-canary 0c4d1f0a-5a2e-4b52-8a57-94b6f0b9a1c3

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import from_dlpack

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
INFINITY = float("inf")


@cute.jit
def first_item(kv_indptr: cute.Tensor, b: Int32, chunk: Int32) -> Int32:
    """The first work item of request ``b``."""
    return kv_indptr[b] // chunk + b


@cute.jit
def request_of(kv_indptr: cute.Tensor, item: Int32, chunk: Int32) -> Int32:
    """The last request whose items begin at or before ``item``, found by the warp together."""
    count = Int32(0)
    for b in cutlass.range(cute.arch.lane_idx(), cute.size(kv_indptr) - 1, 32):
        if first_item(kv_indptr, b, chunk) <= item:
            count += 1
    return cute.arch.warp_reduction_sum(count) - 1


@cute.jit
def channels_of(cache: cute.Tensor, slot: Int32, head: Int32, lane: Int32) -> cute.Tensor:
    """The VECTOR channels of a cache row that belong to ``lane``."""
    return cute.flat_divide(cache[Int64(slot), head, None], (VECTOR,))[None, lane]


@cute.kernel
def split_kernel(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    kv_indptr: cute.Tensor,
    kv_indices: cute.Tensor,
    output: cute.Tensor,
    lse: cute.Tensor,
    partial_output: cute.Tensor,
    partial_lse: cute.Tensor,
    scale: Float32,
    chunk: Int32,
) -> None:
    """Attend one request's queries to one chunk of its tokens."""
    item, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    kv_head, half, lane = thread // 32, thread % 32 // LANES, thread % LANES
    slots = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(MAX_CHUNK), byte_alignment=16)

    request = request_of(kv_indptr, item, chunk)
    part = item - first_item(kv_indptr, request, chunk)
    length = kv_indptr[request + 1] - kv_indptr[request]
    begin = kv_indptr[request] + part * chunk
    count = cutlass.min(length - part * chunk, chunk)  # negative: an item that no request needs
    if thread < count:
        slots[thread] = kv_indices[begin + thread]
    cute.arch.sync_threads()

    if count > 0 or part == 0:
        queries = cute.make_rmem_tensor((VECTOR, GROUP), Float32)
        for g in cutlass.range_constexpr(GROUP):
            source = cute.flat_divide(q[Int64(request), kv_head * GROUP + g, None], (VECTOR,))
            queries[None, g].store(source[None, lane].load().to(Float32) * scale)
        total = cute.make_rmem_tensor((VECTOR, GROUP), Float32)
        maximum, weight = cute.make_rmem_tensor(GROUP, Float32), cute.make_rmem_tensor(GROUP, Float32)
        total.fill(0.0)
        weight.fill(0.0)
        maximum.fill(LOWEST)

        keys = cute.make_rmem_tensor((VECTOR, UNROLL), BFloat16)
        values = cute.make_rmem_tensor((VECTOR, UNROLL), BFloat16)
        logits = cute.make_rmem_tensor((UNROLL, GROUP), Float32)
        for first in cutlass.range(0, count, TOKENS_AT_ONCE):
            for u in cutlass.range_constexpr(UNROLL):
                # Past the end the last token is read again, and its logit is dropped: unlisted slots may hold NaN.
                slot = slots[cutlass.min(first + 2 * u + half, count - 1)]
                keys[None, u].store(channels_of(k_cache, slot, kv_head, lane).load())
                values[None, u].store(channels_of(v_cache, slot, kv_head, lane).load())
            for u in cutlass.range_constexpr(UNROLL):
                key = keys[None, u].load().to(Float32)
                for g in cutlass.range_constexpr(GROUP):
                    dot = (key * queries[None, g].load()).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                    dot = cute.arch.warp_reduction_sum(dot, threads_in_group=LANES)
                    logits[u, g] = dot if first + 2 * u + half < count else Float32(-INFINITY)
            for g in cutlass.range_constexpr(GROUP):
                highest = maximum[g]
                for u in cutlass.range_constexpr(UNROLL):
                    highest = cute.arch.fmax(highest, logits[u, g])
                rescale = cute.math.exp2(maximum[g] - highest, fastmath=True)
                maximum[g] = highest
                weight[g] = weight[g] * rescale
                total[None, g].store(total[None, g].load() * rescale)
                for u in cutlass.range_constexpr(UNROLL):
                    p = cute.math.exp2(logits[u, g] - highest, fastmath=True)
                    weight[g] = weight[g] + p
                    total[None, g].store(total[None, g].load() + values[None, u].load().to(Float32) * p)

        alone = length <= chunk
        for g in cutlass.range_constexpr(GROUP):
            head = kv_head * GROUP + g
            highest = cute.arch.warp_reduction_max(maximum[g])
            rescale = cute.math.exp2(maximum[g] - highest, fastmath=True)
            own_weight = weight[g] * rescale
            sum_weight = own_weight + cute.arch.shuffle_sync_bfly(own_weight, offset=LANES)
            inverse, result_lse = Float32(0.0), Float32(-INFINITY)
            if sum_weight > 0.0:
                inverse = 1.0 / sum_weight
                result_lse = highest + cute.math.log2(sum_weight, fastmath=True)
            for c in cutlass.range_constexpr(VECTOR):
                own = total[c, g] * rescale
                total[c, g] = (own + cute.arch.shuffle_sync_bfly(own, offset=LANES)) * inverse
            if half == 0:
                if alone:
                    target = cute.flat_divide(output[Int64(request), head, None], (VECTOR,))
                    target[None, lane].store(total[None, g].load().to(BFloat16))
                else:
                    partial = cute.flat_divide(partial_output[Int64(item), head, None], (VECTOR,))
                    partial[None, lane].store(total[None, g].load())
                if lane == 0:
                    if alone:
                        lse[request, head] = result_lse
                    else:
                        partial_lse[item, head] = result_lse


@cute.kernel
def merge_kernel(
    kv_indptr: cute.Tensor,
    partial_output: cute.Tensor,
    partial_lse: cute.Tensor,
    output: cute.Tensor,
    lse: cute.Tensor,
    chunk: Int32,
) -> None:
    """Merge the partial results of one request (block_idx.y) and head (block_idx.x), if there are several."""
    head, request, _ = cute.arch.block_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    sums = cutlass.utils.SmemAllocator().allocate_tensor(
        Float32, cute.make_layout((HEAD_DIM, MERGE_WARPS)), byte_alignment=16
    )
    length = kv_indptr[request + 1] - kv_indptr[request]
    if length > chunk:
        begin = first_item(kv_indptr, request, chunk)
        end = begin + cute.ceil_div(length, chunk)
        highest = Float32(LOWEST)
        for item in cutlass.range(begin + lane, end, 32):
            highest = cute.arch.fmax(highest, partial_lse[item, head])
        highest = cute.arch.warp_reduction_max(highest)
        weight = Float32(0.0)
        for item in cutlass.range(begin + lane, end, 32):
            weight += cute.math.exp2(partial_lse[item, head] - highest, fastmath=True)
        weight = cute.arch.warp_reduction_sum(weight)

        # Each warp sums every MERGE_WARPS-th part, each thread 4 channels of it; then a thread sums its own channel.
        own = cute.make_rmem_tensor(4, Float32)
        own.fill(0.0)
        for item in cutlass.range(begin + warp, end, MERGE_WARPS, unroll=4):
            part = cute.flat_divide(partial_output[Int64(item), head, None], (4,))[None, lane]
            own.store(own.load() + part.load() * cute.math.exp2(partial_lse[item, head] - highest, fastmath=True))
        cute.flat_divide(sums[None, warp], (4,))[None, lane].store(own.load())
        cute.arch.sync_threads()
        channel = cute.arch.thread_idx()[0]
        merged = Float32(0.0)
        for w in cutlass.range_constexpr(MERGE_WARPS):
            merged += sums[channel, w]
        output[Int64(request), head, channel] = (merged / weight).to(BFloat16)
        if channel == 0:
            lse[request, head] = highest + cute.math.log2(weight, fastmath=True)


@cute.jit
def launch(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    kv_indptr: cute.Tensor,
    kv_indices: cute.Tensor,
    output: cute.Tensor,
    lse: cute.Tensor,
    partial_output: cute.Tensor,
    partial_lse: cute.Tensor,
    sm_scale: Float32,
    chunk: Int32,
    stream: cuda.CUstream,
) -> None:
    """One block per work item, then one per request and head."""
    split_kernel(
        q, k_cache, v_cache, kv_indptr, kv_indices, output, lse, partial_output, partial_lse, sm_scale * LOG2_E, chunk
    ).launch(
        grid=[cute.size(partial_lse, mode=[0]), 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=2,  # 128 registers: 16 warps to hide the latency of scattered rows
        stream=stream,
    )
    if cute.size(kv_indices) > chunk:
        merge_kernel(kv_indptr, partial_output, partial_lse, output, lse, chunk).launch(
            grid=[HEADS, cute.size(q, mode=[0]), 1], block=[HEAD_DIM, 1, 1], stream=stream
        )


_compiled: list[Any] = []


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
    caches = (cache.view(-1, KV_HEADS, HEAD_DIM) for cache in (k_cache, v_cache))
    tensors = (q, *caches, kv_indptr, kv_indices, output, lse, partial_output, partial_lse)
    views = [from_dlpack(t, assumed_align=16).mark_compact_shape_dynamic(0) for t in tensors]
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = (*views, Float32(sm_scale), Int32(chunk), stream)
    if not _compiled:
        _compiled.append(cute.compile(launch, *arguments))
    _compiled[0](*arguments)
    return output, lse
