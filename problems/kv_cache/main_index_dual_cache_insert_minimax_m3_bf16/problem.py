"""RMSNorm and partial rotary embedding of queries, keys, index queries and index keys, and their write into the paged
cache and the index cache of sparse attention (MiniMax-M3).

There are T tokens, Hq query heads, H key/value heads, Hi index-query heads and one index key, D channels per head (R of
them rotated, R even, R <= D), P positions, NB pages and BS slots per page in both caches. Slot s is place s % BS of
page s // BS.

Inputs, contiguous and row-major:
  qkv                  [T, W]             bfloat16  W = (Hq + 2 H + Hi + 1) D; a token's row: Hq query heads, H key
                                                    heads, H value heads, Hi index-query heads, the index key
  q_norm_weight        [D]                bfloat16
  k_norm_weight        [D]                bfloat16
  index_q_norm_weight  [D]                bfloat16
  index_k_norm_weight  [D]                bfloat16
  positions            [T]                int64     in [0, P), in no order; they may repeat
  cos_sin_cache        [P, R]             bfloat16  row p: R / 2 cosines, then R / 2 sines
  slot_mapping         [T]                int64     slots of kv_cache in [0, NB BS), each at most once, or -1
  index_slot_mapping   [T]                int64     slots of index_cache, likewise; unrelated to slot_mapping
  kv_cache             [NB, H, BS, 2 D]   bfloat16  a row: D of the key, then D of the value
  index_cache          [NB, BS, D]        bfloat16
  num_q_heads          int                          Hq

Outputs, a tuple in this order, contiguous and row-major:
  q                    [T, Hq, D]         bfloat16
  index_q              [T, Hi, D]         bfloat16
  kv_cache             [NB, H, BS, 2 D]   bfloat16  the input's content, with the tokens' keys and values written
  index_cache          [NB, BS, D]        bfloat16  the input's content, with the tokens' index keys written

For token t and each head x (D values) of queries, keys, index queries and the index key, with the weight w of its kind:
  y = bfloat16(float32(x) / sqrt(mean(float32(x)^2) + 1e-6) * (1 + float32(w)))
  c, s = cos_sin_cache[positions[t], :R/2], cos_sin_cache[positions[t], R/2:]
  a, b = y[:R/2], y[R/2:R]
  out[:R/2] = bfloat16(a * c - b * s)
  out[R/2:R] = bfloat16(b * c + a * s)
  out[R:] = y[R:]
q[t] and index_q[t] hold the out of their heads. If slot = slot_mapping[t] >= 0, for each key/value head h:
  kv_cache[slot // BS, h, slot % BS] = [out of key head h, value head h as it is]
If slot = index_slot_mapping[t] >= 0:
  index_cache[slot // BS, slot % BS] = out of the index key

Numerics: each formula is computed in float32 from widened operands and rounded once, to nearest even; the mean runs
over the D channels and is accumulated in float32. Keeping y in float32 is within the tolerance. Values, and slots that
no token addresses, come out bit for bit.

Rules:
- -1 in one mapping skips the write to that cache only; all else of the token is computed like any other's.
- Slots that no token addresses may hold anything, NaN included.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal, permutation
from mkb_env.problems.kv_cache import common

TITLE = "Norm, rotary embedding and insert into a KV cache and an index cache"
NUMBER = 22
MODEL = "MiniMax-M3"
INPUTS = (
    "qkv", "q_norm_weight", "k_norm_weight", "index_q_norm_weight", "index_k_norm_weight", "positions",
    "cos_sin_cache", "slot_mapping", "index_slot_mapping", "kv_cache", "index_cache", "num_q_heads",
)  # fmt: skip
OUTPUTS = ("q", "index_q", "kv_cache", "index_cache")
HOST_VISIBLE = ()
EPS = 1e-6
BASE = 5e6
HEAD = {"D": 128, "R": 64}
WORKLOADS = {
    "full": {
        "T": 8192, "Hq": 64, "H": 4, "Hi": 4, **HEAD, "BS": 64, "NB": 160, "P": 16384, "pads": 50, "index_pads": 70,
        "small_rows": 9,
    },
    "small": {
        "T": 6, "Hq": 4, "H": 2, "Hi": 2, **HEAD, "BS": 4, "NB": 3, "P": 16, "pads": 1, "index_pads": 2,
        "small_rows": 2,
    },
    "heldout": [
        {"T": 513, "Hq": 16, "H": 4, "Hi": 4, **HEAD, "BS": 64, "NB": 10, "P": 4096},
        {
            "T": 67, "Hq": 8, "H": 2, "Hi": 1, **HEAD, "BS": 16, "NB": 6, "P": 333, "pads": 13, "index_pads": 14,
            "small_rows": 1,
        },
    ],
}  # fmt: skip


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, dim = shape["T"], shape["D"]
    heads = shape["Hq"] + 2 * shape["H"] + shape["Hi"] + 1
    weight, indices = ((dim,), torch.bfloat16), ((tokens,), torch.int64)
    return (
        ((tokens, heads * dim), torch.bfloat16),
        *(weight,) * 4,
        indices,
        ((shape["P"], shape["R"]), torch.bfloat16),
        indices,
        indices,
        *output_specs(shape)[2:],
        shape["Hq"],
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    tokens, dim, pages, size = shape["T"], shape["D"], shape["NB"], shape["BS"]
    sizes = (
        (tokens, shape["Hq"], dim),
        (tokens, shape["Hi"], dim),
        (pages, shape["H"], size, 2 * dim),
        (pages, size, dim),
    )
    return tuple((size, torch.bfloat16) for size in sizes)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | int, ...]:
    """Standard normal values, weights of 0.1 N(0, 1), random positions and slots, in ``INPUTS``' order.

    ``small_rows`` tokens are scaled by 1e-3, so that the 1e-6 counts. ``pads`` random tokens have slot -1 in one
    mapping, ``index_pads`` others in the other. Some cache rows hold arbitrary bits.
    """
    tokens, dim, slots = shape["T"], shape["D"], shape["NB"] * shape["BS"]
    qkv = normal(generator, *input_specs(shape)[0][0])
    qkv[integers(generator, shape.get("small_rows", 0), high=tokens, dtype=torch.int64)] *= 1e-3
    qkv = qkv.bfloat16()
    weights = [normal(generator, dim, dtype=torch.bfloat16, scale=0.1) for _ in range(4)]
    positions = integers(generator, tokens, high=shape["P"], dtype=torch.int64)
    table = common.rotary_table(shape["P"], shape["R"], BASE, generator.device)
    mappings = [common.slot_mapping(generator, tokens, slots) for _ in range(2)]
    pads = [shape.get(key, 0) for key in ("pads", "index_pads")]
    for mapping, padded in zip(mappings, permutation(generator, tokens)[: sum(pads)].split(pads), strict=True):
        mapping[padded] = -1
    caches = [
        common.scramble(generator, normal(generator, *sizes, dtype=torch.bfloat16), rows=max(6, slots // 16))
        for sizes, _ in output_specs(shape)[2:]
    ]
    return qkv, *weights, positions, table, *mappings, *caches, shape["Hq"]


def reference(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    index_q_norm_weight: torch.Tensor,
    index_k_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor,
    num_q_heads: int,
) -> tuple[torch.Tensor, ...]:
    """The module's formula; float64 inputs are computed in float64."""
    kv_heads, dim = kv_cache.shape[1], index_cache.shape[2]
    heads = qkv.view(len(qkv), -1, dim)
    index_heads = heads.shape[1] - num_q_heads - 2 * kv_heads - 1
    q, k, v, index_q, index_k = heads.split((num_q_heads, kv_heads, kv_heads, index_heads, 1), dim=1)
    table = cos_sin_cache[positions].unsqueeze(1)
    q, k, index_q, index_k = (
        _rotated(_normed(x, weight), table)
        for x, weight in (
            (q, q_norm_weight), (k, k_norm_weight), (index_q, index_q_norm_weight), (index_k, index_k_norm_weight)
        )
    )  # fmt: skip
    new_cache = insert_by_head(kv_cache, slot_mapping, torch.cat((k, v), dim=-1))
    return q, index_q, new_cache, common.insert(index_cache, index_slot_mapping, index_k.squeeze(1))


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    r = torch.rsqrt(x.to(wide).square().mean(dim=-1, keepdim=True) + EPS)
    return (x.to(wide) * r * (1.0 + weight.to(wide))).to(x.dtype)


def _rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return common.rotate_first(x.to(wide), table.to(wide)).to(x.dtype)


def insert_by_head(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of ``cache`` [NB, H, BS, n] with rows[t, h] at slot slots[t] of head h, where that is not negative."""
    result, kept = cache.clone(), slots >= 0
    pages, places = slots[kept] // cache.shape[2], slots[kept] % cache.shape[2]
    result[pages, :, places] = rows[kept]
    return result


def anchor(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """The reference in float64, the caches as numbers that stand for their bits."""
    return reference(*common.widened(inputs, 9, 10))


decode = common.cache_bits


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """Rounded rotations for queries and written keys; nothing for all else in the caches."""
    magnitude = common.rotated_magnitude(anchor, 0, inputs[6].shape[1])
    if name in ("q", "index_q"):
        return common.rounded_rotation(anchor, magnitude)
    if name == "index_cache":
        slots, count = inputs[8], anchor[..., 0].numel()
        computed = common.touched(slots, count).view(*anchor.shape[:2], 1)
    else:
        slots, count = inputs[7], anchor[:, 0, :, 0].numel()
        is_key = torch.arange(anchor.shape[3], device=anchor.device) < anchor.shape[3] // 2
        computed = common.touched(slots, count).view(len(anchor), 1, -1, 1) & is_key
    part = len(slots) / count * (1.0 if name == "index_cache" else 0.5)
    return common.rounded_rotation(anchor, torch.where(computed, magnitude, 0.0), part)


def COST(shape: Shape) -> Cost:
    """Queries of both kinds read and written, each slot read from one place and written; all else read once."""
    tokens, dim, rotary = shape["T"], shape["D"], shape["R"]
    queries, cached = shape["Hq"] + shape["Hi"], 2 * shape["H"] + 1
    elements = 2 * tokens * queries * dim + 2 * shape["NB"] * shape["BS"] * cached * dim + 4 * dim
    table = rotary * min(tokens, shape["P"])
    flops = tokens * (queries + shape["H"] + 1) * (5 * dim + 3 * rotary)
    return Cost(bytes=2 * (elements + table) + 24 * tokens, flops=flops, unit="fp32")
