"""Query up-projection, rotary embedding and compressed-cache update of multi-head latent attention (DeepSeek-V3; 16
heads are one of eight shards of its 128).

There are T tokens, H heads of 128 plain and R rotated query channels, QL channels of the query latent, KL channels of
the key/value latent, P positions, NB cache pages and BS slots per page. Slot s is place s % BS of page s // BS.

Inputs, contiguous and row-major:
  qkv_lora       [T, QL + KL + R]        bfloat16  a token's row: query latent q_c, key/value latent kv_c, key part k_pe
  q_b_weight     [H (128 + R), QL]       bfloat16  rows by head; in a head, 128 plain rows and then R to be rotated
  positions      [T]                     int64     in [0, P), in no order; they may repeat
  cos_sin_cache  [P, R]                  bfloat16  row p: R / 2 cosines, then R / 2 sines
  slot_mapping   [T]                     int64     slots in [0, NB BS), each at most once, or -1
  kv_cache       [NB, BS, 1, KL + R]     bfloat16

Outputs, a tuple in this order, contiguous and row-major:
  q              [T, H, 128 + R]         bfloat16
  kv_cache       [NB, BS, 1, KL + R]     bfloat16  the input's content, with the tokens' rows written

For token t, with rot(x) the rotation of R values x by the table's row of the token's position:
  c, s = cos_sin_cache[positions[t], :R/2], cos_sin_cache[positions[t], R/2:]
  a, b = x[:R/2], x[R/2:]
  rot(x)[:R/2] = bfloat16(bfloat16(a * c) - bfloat16(b * s))
  rot(x)[R/2:] = bfloat16(bfloat16(b * c) + bfloat16(a * s))
the outputs are
  Q = bfloat16(q_b_weight @ q_c), seen as [H, 128 + R]
  q[t, h] = [Q[h, :128], rot(Q[h, 128:])]
and, if slot = slot_mapping[t] >= 0:
  kv_cache[slot // BS, slot % BS, 0] = [kv_c, rot(k_pe)]

Numerics: the product is accumulated in float32 and rounded once; roundings are to nearest even. Keeping intermediate
values of the rotation, or the product before it, in float32 is within the tolerance. kv_c, and slots that no token
addresses, come out bit for bit.

Rules:
- A token with slot -1 writes nothing; its q is computed like any other. Such tokens may stand anywhere.
- Slots that no token addresses may hold anything, NaN included.
- Pairs to be rotated lie R / 2 apart; they are not neighbours.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal
from mkb_env.problems.kv_cache import common

TITLE = "MLA query up-projection, rotary embedding and compressed-cache update"
NUMBER = 20
MODEL = "DeepSeek-V3"
INPUTS = ("qkv_lora", "q_b_weight", "positions", "cos_sin_cache", "slot_mapping", "kv_cache")
OUTPUTS = ("q", "kv_cache")
HOST_VISIBLE = ()
PLAIN = 128
BASE = 10000.0
MLA = {"QL": 1536, "KL": 512, "R": 64}
WORKLOADS = {
    "full": {"T": 2048, "H": 16, **MLA, "BS": 16, "NB": 256, "P": 4096, "tail_pads": 128, "pads": 5},
    "small": {"T": 8, "H": 2, "QL": 96, "KL": 64, "R": 64, "BS": 4, "NB": 3, "P": 32, "tail_pads": 1, "pads": 1},
    "heldout": [
        {"T": 1111, "H": 5, **MLA, "BS": 64, "NB": 19, "P": 5000, "pads": 37},
        {"T": 1, "H": 16, "QL": 768, "KL": 512, "R": 64, "BS": 16, "NB": 2, "P": 7},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, rotary, latent = shape["T"], shape["R"], shape["KL"]
    return (
        ((tokens, shape["QL"] + latent + rotary), torch.bfloat16),
        ((shape["H"] * (PLAIN + rotary), shape["QL"]), torch.bfloat16),
        ((tokens,), torch.int64),
        ((shape["P"], rotary), torch.bfloat16),
        ((tokens,), torch.int64),
        ((shape["NB"], shape["BS"], 1, latent + rotary), torch.bfloat16),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (
        ((shape["T"], shape["H"], PLAIN + shape["R"]), torch.bfloat16),
        ((shape["NB"], shape["BS"], 1, shape["KL"] + shape["R"]), torch.bfloat16),
    )


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal values, weights of 0.02 N(0, 1), random positions and slots, in ``INPUTS``' order.

    Slots are -1 at ``pads`` random tokens and at the last 1 to ``tail_pads``. Some cache rows hold arbitrary bits.
    """
    (row_sizes, _), (weight_sizes, _), _, _, _, (cache_sizes, _) = input_specs(shape)
    tokens, slots = shape["T"], shape["NB"] * shape["BS"]
    rows = normal(generator, *row_sizes, dtype=torch.bfloat16)
    weight = normal(generator, *weight_sizes, dtype=torch.bfloat16, scale=0.02)
    positions = integers(generator, tokens, high=shape["P"], dtype=torch.int64)
    table = common.rotary_table(shape["P"], shape["R"], BASE, generator.device)
    mapping = common.slot_mapping(generator, tokens, slots, shape.get("pads", 0), shape.get("tail_pads", 0))
    cache = common.scramble(generator, normal(generator, *cache_sizes, dtype=torch.bfloat16), rows=max(3, slots // 64))
    return rows, weight, positions, table, mapping, cache


def reference(
    qkv_lora: torch.Tensor,
    q_b_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    wide = torch.promote_types(qkv_lora.dtype, torch.float32)
    rank, rotary = q_b_weight.shape[1], cos_sin_cache.shape[1]
    q_c, kv_c, k_pe = qkv_lora.split((rank, kv_cache.shape[3] - rotary, rotary), dim=1)
    cos, sin = cos_sin_cache[positions].chunk(2, dim=1)
    q = (q_c.to(wide) @ q_b_weight.to(wide).T).to(qkv_lora.dtype).view(len(qkv_lora), -1, PLAIN + rotary)
    q_pe = common.rotate(q[..., PLAIN:], cos.unsqueeze(1), sin.unsqueeze(1))
    rows = torch.cat((kv_c, common.rotate(k_pe, cos, sin)), dim=1)
    return torch.cat((q[..., :PLAIN], q_pe), dim=-1), common.insert(kv_cache, slot_mapping, rows.unsqueeze(1))


def anchor(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64, the cache as numbers that stand for its bits."""
    return reference(*common.widened(inputs, 5))


decode = common.cache_bits


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """Rounded rotations for queries and written key parts; nothing for all else in the cache.

    The sum of a query channel may cancel, hence another sixteenth of the head's root mean square.
    """
    table, slots = inputs[3:5]
    rotary = table.shape[1]
    magnitude = common.rotated_magnitude(anchor, anchor.shape[-1] - rotary, rotary)
    if name == "q":
        floor = anchor.square().mean(dim=-1, keepdim=True).sqrt() / 16
        return common.rounded_rotation(anchor, magnitude + floor)
    written = common.touched(slots, anchor[..., 0].numel()).view(*anchor.shape[:3], 1)
    turned = torch.arange(anchor.shape[-1], device=anchor.device) >= anchor.shape[-1] - rotary
    part = len(slots) * rotary / anchor.numel()
    return common.rounded_rotation(anchor, torch.where(written & turned, magnitude, 0.0), part)


def COST(shape: Shape) -> Cost:
    """Query latents and weights read, queries written, each slot read from one place and written; tables once."""
    tokens, heads, rank, rotary = (shape[key] for key in ("T", "H", "QL", "R"))
    queries = heads * (PLAIN + rotary)
    cache = shape["NB"] * shape["BS"] * (shape["KL"] + rotary)
    moved = tokens * rank + queries * rank + tokens * queries + 2 * cache + rotary * min(tokens, shape["P"])
    flops = 2 * tokens * rank * queries + 6 * tokens * (heads + 1) * rotary
    return Cost(bytes=2 * moved + 16 * tokens, flops=flops, unit="bf16")
