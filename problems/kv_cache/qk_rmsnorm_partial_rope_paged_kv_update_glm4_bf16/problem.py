"""RMSNorm of each query and key head, rotary embedding of half of each head, and the write of keys and values into a
paged cache: what lies between the QKV projection and attention in GLM-4.5.

There are T tokens, Hq query heads, H key/value heads, D channels per head (R of them rotated, R even, R <= D), P
positions, NB cache pages and BS slots per page. Slot s is place s % BS of page s // BS.

Inputs, contiguous and row-major:
  qkv             [T, (Hq + 2 H) D]    bfloat16  a token's row: Hq query heads, then H key heads, then H value heads
  positions       [T]                  int64     in [0, P), in no order; they may repeat
  q_norm_weight   [D]                  bfloat16
  k_norm_weight   [D]                  bfloat16
  cos_sin_cache   [P, R]               bfloat16  row p: R / 2 cosines, then R / 2 sines
  slot_mapping    [T]                  int64     slots in [0, NB BS), each at most once, or -1
  kv_cache        [2, NB, BS, H, D]    bfloat16  keys at index 0, values at index 1
  eps             float

Outputs, a tuple in this order, contiguous and row-major:
  q               [T, Hq, D]           bfloat16
  kv_cache        [2, NB, BS, H, D]    bfloat16  the input's content, with the tokens' keys and values written

Hq follows from the width of qkv: Hq = width / D - 2 H. For token t and each of its query and key heads x (D values),
with w = q_norm_weight or k_norm_weight:
  n = bfloat16(float32(x) / sqrt(mean(float32(x)^2) + eps))
  y = bfloat16(n * w)
  c, s = cos_sin_cache[positions[t], :R/2], cos_sin_cache[positions[t], R/2:]
  a, b = y[:R/2], y[R/2:R]
  out[:R/2] = bfloat16(bfloat16(a * c) - bfloat16(b * s))
  out[R/2:R] = bfloat16(bfloat16(b * c) + bfloat16(a * s))
  out[R:] = y[R:]
q[t] holds the out of the query heads. If slot = slot_mapping[t] >= 0, with page = slot // BS and place = slot % BS:
  kv_cache[0, page, place] = out of the key heads
  kv_cache[1, page, place] = the value heads as they are

Numerics: the mean runs over the D channels and is accumulated in float32; roundings are to nearest even. Keeping
intermediate values of the norm and the rotation in float32 is within the tolerance. Values, and slots that no token
addresses, come out bit for bit.

Rules:
- A token with slot -1 writes nothing; its q is computed like any other. Such tokens may stand anywhere.
- Slots that no token addresses may hold anything, NaN included.
- The weight is w, not 1 + w.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal
from mkb_env.problems.kv_cache import common

TITLE = "QK RMSNorm, partial rotary embedding and paged KV-cache update"
NUMBER = 19
MODEL = "GLM-4.5"
INPUTS = (
    "qkv",
    "positions",
    "q_norm_weight",
    "k_norm_weight",
    "cos_sin_cache",
    "slot_mapping",
    "kv_cache",
    "eps",
)
OUTPUTS = ("q", "kv_cache")
HOST_VISIBLE = ()
EPS = 1e-5
BASE = 10000.0
GLM = {"H": 8, "D": 128, "R": 64}
WORKLOADS = {
    "full": {"T": 2048, "Hq": 32, **GLM, "BS": 16, "NB": 256, "P": 4096, "tail_pads": 128, "pads": 5, "small_rows": 9},
    "small": {
        "T": 12, "Hq": 4, "H": 2, "D": 128, "R": 64, "BS": 16, "NB": 2, "P": 64, "tail_pads": 2, "pads": 1,
        "small_rows": 2,
    },
    "heldout": [
        {"T": 777, "Hq": 96, **GLM, "BS": 64, "NB": 20, "P": 8192, "pads": 9},
        {"T": 33, "Hq": 12, "H": 1, "D": 128, "R": 64, "BS": 16, "NB": 5, "P": 100, "pads": 33, "small_rows": 1},
    ],
}  # fmt: skip


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    tokens, kv_heads, dim = shape["T"], shape["H"], shape["D"]
    weight = (dim,), torch.bfloat16
    return (
        ((tokens, (shape["Hq"] + 2 * kv_heads) * dim), torch.bfloat16),
        ((tokens,), torch.int64),
        weight,
        weight,
        ((shape["P"], shape["R"]), torch.bfloat16),
        ((tokens,), torch.int64),
        ((2, shape["NB"], shape["BS"], kv_heads, dim), torch.bfloat16),
        EPS,
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    tokens, kv_heads, dim = shape["T"], shape["H"], shape["D"]
    return (
        ((tokens, shape["Hq"], dim), torch.bfloat16),
        ((2, shape["NB"], shape["BS"], kv_heads, dim), torch.bfloat16),
    )


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Standard normal values, random positions and slots, in ``INPUTS``' order.

    ``small_rows`` tokens are scaled by 3e-3, so that eps counts. Slots are -1 at ``pads`` random tokens and at the last
    1 to ``tail_pads``. Some cache rows hold arbitrary bits.
    """
    (qkv_sizes, _), _, _, _, _, _, (cache_sizes, _), _ = input_specs(shape)
    tokens, dim = shape["T"], shape["D"]
    qkv = normal(generator, *qkv_sizes)
    qkv[integers(generator, shape.get("small_rows", 0), high=tokens, dtype=torch.int64)] *= 3e-3
    positions = integers(generator, tokens, high=shape["P"], dtype=torch.int64)
    q_weight, k_weight = (normal(generator, dim, dtype=torch.bfloat16) for _ in range(2))
    table = common.rotary_table(shape["P"], shape["R"], BASE, generator.device)
    slots = common.slot_mapping(
        generator, tokens, shape["NB"] * shape["BS"], shape.get("pads", 0), shape.get("tail_pads", 0)
    )
    cache = common.scramble(generator, normal(generator, *cache_sizes, dtype=torch.bfloat16), rows=32)
    return qkv.bfloat16(), positions, q_weight, k_weight, table, slots, cache, EPS


def reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    kv_heads, dim = kv_cache.shape[3:]
    heads = qkv.view(len(qkv), -1, dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    table = cos_sin_cache[positions].unsqueeze(1)
    q, k = (
        common.rotate_first(_normed(x, weight, eps), table) for x, weight in ((q, q_norm_weight), (k, k_norm_weight))
    )
    caches = [common.insert(cache, slot_mapping, rows) for cache, rows in zip(kv_cache, (k, v), strict=True)]
    return q, torch.stack(caches)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def anchor(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64, the cache as numbers that stand for its bits."""
    return reference(*common.widened(inputs, 6))


decode = common.cache_bits


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """Rounded rotations for queries and written keys; nothing for all else in the cache."""
    table, slots = inputs[4:6]
    magnitude = common.rotated_magnitude(anchor, 0, table.shape[1])
    if name == "q":
        return common.rounded_rotation(anchor, magnitude)
    written = common.touched(slots, anchor[0, ..., 0, 0].numel()).view(1, *anchor.shape[1:3], 1, 1)
    keys = torch.tensor([True, False], device=anchor.device).view(2, 1, 1, 1, 1)
    part = len(slots) / (2 * written.numel())
    return common.rounded_rotation(anchor, torch.where(written & keys, magnitude, 0.0), part)


def COST(shape: Shape) -> Cost:
    """Queries read and written, each cache slot read from one place and written; all else read once."""
    tokens, heads, kv_heads, dim, rotary = (shape[key] for key in ("T", "Hq", "H", "D", "R"))
    cache = 2 * shape["NB"] * shape["BS"] * kv_heads * dim
    others = 2 * rotary * min(tokens, shape["P"]) + 16 * tokens + 4 * dim
    flops = tokens * (heads + kv_heads) * (4 * dim + 3 * rotary)
    return Cost(bytes=4 * tokens * heads * dim + 4 * cache + others, flops=flops, unit="fp32")
