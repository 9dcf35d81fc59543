"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.attention.variants import altered
from mkb_env.problems.attention.varlen_vision_attention_qwen_image_edit_bf16 import problem

INDEPENDENT = (
    "complex rotation and scaled_dot_product_attention by segment, float64; windows, order and angles of transformers"
)


def _as_model(inputs: Sequence[Any], truth: torch.Tensor) -> None:
    """Token order, windows and angles of the model, and its attention layer (which works in float32)."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as model

    qkv, cos, sin, cu_seqlens, _ = inputs
    workloads: dict[str, Any] = problem.WORKLOADS
    shapes = [workloads["full"], workloads["small"], *workloads["heldout"]]
    shape = next(shape for shape in shapes if sum(problem.segments(shape)) == len(qkv))
    if any(size % 2 for image in shape["images"] for size in image):
        return
    config = model.Qwen2_5_VLVisionConfig(hidden_size=1280, num_heads=16)
    config._attn_implementation = "eager"
    grid = torch.tensor([[1, *image] for image in shape["images"]])
    window_index, windows = model.get_vision_window_index(grid, 2, 112, 14)
    if "lengths" not in shape:
        assert torch.equal(windows.cpu(), cu_seqlens.unique_consecutive().cpu()), "windows differ"
    places = model.get_vision_position_ids(grid, 2).unflatten(0, (-1, 4))[window_index].flatten(0, 1)
    angles = model.Qwen2_5_VLVisionRotaryEmbedding(config)(places.float(), places)
    for ours, theirs in zip((cos, sin), angles, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-4)
    with torch.device("meta"):
        layer: Any = model.Qwen2_5_VLVisionAttention(config)
    layer.qkv = layer.proj = torch.nn.Identity()
    rotated = model.apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], cos, sin)
    tokens = torch.stack((*rotated, qkv[:, 2]), dim=1).double().flatten(1)
    found = layer.eval()(tokens, cu_seqlens.unique_consecutive(), (torch.ones_like(cos), torch.zeros_like(sin)))
    torch.testing.assert_close(truth, found, rtol=1e-2, atol=1e-2)
    assert (truth - found).square().mean() < 1e-10, "the layer's outputs differ"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Rotation by complex numbers, then torch's own attention on each segment."""
    qkv, cos, sin, cu_seqlens, scale = inputs
    q, k, v = qkv.double().transpose(0, 2).transpose(0, 1)  # [heads, tokens, channels]
    turn = torch.complex(cos[:, :40].double(), sin[:, :40].double())
    q, k = (torch.complex(*x.chunk(2, dim=-1)) * turn for x in (q, k))
    q, k = (torch.cat((x.real, x.imag), dim=-1).bfloat16().double() for x in (q, k))
    for begin, end in pairwise(cu_seqlens.tolist()):
        mine, keys, values = (x[None, :, begin:end] for x in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(mine, keys, values, scale=scale)[0]
        want = truth[0][begin:end].unflatten(1, (problem.HEADS, -1)).transpose(0, 1)
        torch.testing.assert_close(want, found, rtol=1e-9, atol=1e-12)
    _as_model(inputs, truth[0])


def _blocked(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    block: int = 48,
    base: float = math.e,
) -> torch.Tensor:
    """Online softmax over blocks of keys with bfloat16 probabilities, rotation in halves."""
    first, second = qkv.float().chunk(2, dim=-1)
    c, s = cos[:, None, None, :40], sin[:, None, None, :40]
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    q, k = turned[:, :2].bfloat16().float().permute(1, 2, 0, 3)
    v = qkv[:, 2].float().transpose(0, 1)
    out = torch.empty_like(qkv[:, 0])
    for begin, end in pairwise(cu_seqlens.tolist()):
        if begin == end:
            continue
        queries = q[:, begin:end] * (scale / math.log(base))
        total = torch.zeros_like(queries)
        highest = total.new_full((*total.shape[:2], 1), -1e30)
        weight = torch.zeros_like(highest)
        for at in range(begin, end, block):
            keys = slice(at, min(at + block, end))
            logits = queries @ k[:, keys].mT
            new = torch.maximum(highest, logits.amax(-1, keepdim=True))
            p, rescale = base ** (logits - new), base ** (highest - new)
            weight = weight * rescale + p.sum(-1, keepdim=True)
            total = total * rescale + p.bfloat16().float() @ v[:, keys]
            highest = new
        out[begin:end] = (total / weight).transpose(0, 1)
    return out.flatten(1)


def _adjacent_pairs(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any) -> torch.Tensor:
    """Channels 2i and 2i + 1 as a pair: what a kernel that takes the wrong pairing computes."""
    order = torch.arange(problem.HEAD_DIM, device=qkv.device).view(2, -1).T.flatten()
    mixed = torch.cat((qkv[:, :2][..., order.argsort()], qkv[:, 2:]), dim=1)
    return problem.reference(mixed, cos, sin, *others)


def _not_rotated(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any) -> torch.Tensor:
    return problem.reference(qkv, torch.ones_like(cos), torch.zeros_like(sin), *others)


def _neighbour(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each segment of fewer than 16 tokens is taken together with what precedes it, as if tiles held one segment."""
    ends = [end for begin, end in pairwise(cu_seqlens.tolist()) if end - begin >= 16]
    if ends[-1:] != [len(qkv)]:
        ends.append(len(qkv))
    return problem.reference(qkv, cos, sin, torch.tensor([0, *ends]), scale)


WRONG = {
    "rotation pairs of adjacent channels": _adjacent_pairs,
    "no rotation": _not_rotated,
    "scale of the width padded to 96": altered(problem.reference, lambda _: 96**-0.5, 4),
    "a short segment not separated from its neighbour": _neighbour,
}
SECOND = {
    "online softmax over 48 keys, probabilities in bfloat16": _blocked,
    "scale folded into base-2 logits, blocks of 64 keys": partial(_blocked, block=64, base=2.0),
}
