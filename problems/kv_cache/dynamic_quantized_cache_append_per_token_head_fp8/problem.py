"""Quantise new keys and values to fp8 with a scale per token and head, and append them to paged caches of codes and
scales (Llama-3-8B).

There are T tokens, H key/value heads, D channels per head, NB cache pages and BS slots per page. Slot s is place
s % BS of page s // BS. Codes are bytes of the format e4m3 with finite values only (float8_e4m3fn: largest 448, no
infinity, NaN at 0x7F and 0xFF).

Inputs, contiguous and row-major:
  key            [T, H, D]       bfloat16  finite
  value          [T, H, D]       bfloat16  finite
  slot_mapping   [T]             int64     slots in [0, NB BS), each at most once, or -1
  key_cache      [NB, BS, H, D]  uint8     any bytes
  value_cache    [NB, BS, H, D]  uint8     any bytes
  k_scale_cache  [NB, BS, H]     float32
  v_scale_cache  [NB, BS, H]     float32

Outputs, a tuple in this order, contiguous and row-major: the caches with the tokens' rows written
  key_cache      [NB, BS, H, D]  uint8
  value_cache    [NB, BS, H, D]  uint8
  k_scale_cache  [NB, BS, H]     float32
  v_scale_cache  [NB, BS, H]     float32

For token t with slot = slot_mapping[t] >= 0 and each head h, for keys and values alike, in float32:
  x = float32(key[t, h])
  scale = max(max_j |x_j| / 448, 1e-6)
  r = 1 / scale
  code_j = byte of float8_e4m3fn(min(max(x_j * r, -448), 448))
  key_cache[slot // BS, slot % BS, h] = code
  k_scale_cache[slot // BS, slot % BS, h] = scale

Numerics: x is multiplied by the reciprocal r, the product is clamped and then rounded once, to nearest even; values
below the smallest normal number become subnormal codes (multiples of 2^-9) and are not flushed; a zero keeps its sign
(codes 0x00 and 0x80). Scales may be off by 1e-6 of their size, as by division in another way; codes may be neighbours
of the right ones where the scaled number lies that close to the middle between the two.

Rules:
- Rows may be all zero (scale 1e-6), very small (the scale is 1e-6 as well) or large.
- A token with slot -1 writes nothing. Such tokens may stand anywhere.
- Slots that no token addresses come out bit for bit; their bytes may be NaN codes.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal, uniform
from mkb_env.problems.kv_cache import common

TITLE = "Append to an fp8 KV cache with scales per token and head"
NUMBER = 21
MODEL = "Llama-3-8B"
INPUTS = ("key", "value", "slot_mapping", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache")
OUTPUTS = ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")
HOST_VISIBLE = ()
LARGEST = 448.0
LEAST_SCALE = 1e-6
SLACK = 1.5e-6
"""How far a scaled number may be off: 1e-6 of the scale, and the roundings of reciprocal and product."""
LLAMA = {"H": 8, "D": 128, "BS": 16}
WORKLOADS = {
    "full": {"T": 8192, **LLAMA, "NB": 1024, "tail_pads": 128, "pads": 9, "zero_tokens": 3, "spread_tokens": 64},
    "small": {
        "T": 10, "H": 2, "D": 128, "BS": 4, "NB": 4, "tail_pads": 1, "pads": 1, "zero_tokens": 1, "spread_tokens": 3,
    },
    "heldout": [
        {"T": 2048, **LLAMA, "NB": 256, "tail_pads": 128, "spread_tokens": 2048},
        {"T": 301, "H": 3, "D": 192, "BS": 32, "NB": 11, "pads": 40, "zero_tokens": 1},
    ],
}  # fmt: skip


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    new = (shape["T"], shape["H"], shape["D"]), torch.bfloat16
    return new, new, ((shape["T"],), torch.int64), *output_specs(shape)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    sizes = shape["NB"], shape["BS"], shape["H"]
    codes, scales = ((*sizes, shape["D"]), torch.uint8), (sizes, torch.float32)
    return codes, codes, scales, scales


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal rows, random slots and bytes, scales in [0.5, 1.5), in ``INPUTS``' order.

    ``spread_tokens`` tokens have keys and values scaled by 10^U(-8, 3), head by head; ``zero_tokens`` others are 0.
    Slots are -1 at ``pads`` random tokens and at the last 1 to ``tail_pads``.
    """
    tokens, heads, dim = shape["T"], shape["H"], shape["D"]
    slots = shape["NB"] * shape["BS"]
    mapping = common.slot_mapping(generator, tokens, slots, shape.get("pads", 0), shape.get("tail_pads", 0))
    spread, zero = shape.get("spread_tokens", 0), shape.get("zero_tokens", 0)
    chosen = mapping.argsort(descending=True, stable=True)  # tokens with a slot come first, in random order
    new = []
    for _ in range(2):
        rows = normal(generator, tokens, heads, dim)
        rows[chosen[:spread]] *= 10.0 ** uniform(generator, spread, heads, 1, low=-8.0, high=3.0)
        rows[chosen[spread : spread + zero]] *= 0.0
        new.append(rows.bfloat16())
    (codes, _), _, (scales, _), _ = output_specs(shape)
    bytes_ = (integers(generator, *codes, high=256, dtype=torch.uint8) for _ in range(2))
    return *new, mapping, *bytes_, *(uniform(generator, *scales, low=0.5, high=1.5) for _ in range(2))


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The module's formula; float64 inputs are computed in float64."""
    k_codes, k_scales = _quantised(key)
    v_codes, v_scales = _quantised(value)
    pairs = (key_cache, k_codes), (value_cache, v_codes), (k_scale_cache, k_scales), (v_scale_cache, v_scales)
    return tuple(common.insert(cache, slot_mapping, rows) for cache, rows in pairs)


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, H, D] uint8 and scales [T, H]."""
    x = rows.to(torch.promote_types(rows.dtype, torch.float32))
    scales = (x.abs().amax(dim=-1) / LARGEST).clamp(min=LEAST_SCALE)
    return _codes(x * (1.0 / scales).unsqueeze(-1)), scales


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(name: str, outputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Codes in the order of their values, neighbours one apart: -0 is -1, and NaN is far from all others."""
    if name not in ("key_cache", "value_cache"):
        return None
    magnitudes = (outputs[name] & 0x7F).to(torch.float32)
    magnitudes.masked_fill_(magnitudes == 0x7F, 1000.0)
    return torch.where(outputs[name] < 0x80, magnitudes, -1.0 - magnitudes)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """In written slots 1e-6 of a scale, and the neighbours of codes that so little decides; elsewhere nothing.

    A row whose largest number is 448 2^k has a scale that is a power of two: every sixteenth of its numbers is a tie.
    """
    if name in ("k_scale_cache", "v_scale_cache"):
        written = common.touched(inputs[2], anchor[..., 0].numel()).view(*anchor.shape[:2], 1)
        return torch.where(written, 1e-6 * anchor.abs(), 0.0)
    x = inputs[0 if name == "key_cache" else 1].double()
    scaled = x / (x.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    near = _codes(scaled * (1 + SLACK)) != _codes(scaled * (1 - SLACK))
    return common.insert(torch.zeros_like(anchor), inputs[2], near.to(anchor.dtype))


def COST(shape: Shape) -> Cost:
    """Each cache slot read from one place (new rows twice as wide as codes) and written; four operations per number."""
    numbers = 2 * shape["T"] * shape["H"] * shape["D"]
    slots = shape["NB"] * shape["BS"]
    rows = 2 * shape["H"] * (shape["D"] + 4)
    pads = shape.get("pads", 0) + shape.get("tail_pads", 0)
    written = shape["T"] - pads
    moved = 2 * written * 2 * shape["H"] * shape["D"] + (slots - written) * rows + slots * rows + 8 * shape["T"]
    return Cost(bytes=moved, flops=4 * numbers, unit="fp32")
