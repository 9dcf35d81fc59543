"""Copy pages of one pair of key and value caches into another pair, by a list of page pairs (copy on write, swap-in).

There are NB pages in each cache, of BS slots, H heads and D bytes per head, and M page pairs.

Inputs, contiguous and row-major:
  src_k          [NB, BS, H, D]  uint8
  src_v          [NB, BS, H, D]  uint8
  dst_k          [NB, BS, H, D]  uint8
  dst_v          [NB, BS, H, D]  uint8
  block_mapping  [M, 2]          int64  a source page and a destination page, both in [0, NB)

Outputs, a tuple in this order, contiguous and row-major:
  dst_k          [NB, BS, H, D]  uint8
  dst_v          [NB, BS, H, D]  uint8

With (s, d) running over the rows of block_mapping:
  output dst_k[d] = src_k[s]
  output dst_v[d] = src_v[s]
All other pages of the outputs are those of the inputs of the same name.

Numerics: bytes are copied.

Rules:
- No destination occurs twice. A source may occur several times, and a page number may be source and destination.
- M is any positive number.
- Sizes may exceed 2^31 bytes.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import integers, permutation

TITLE = "Copy KV-cache pages by a list of page pairs"
NUMBER = 25
MODEL = "any with a paged KV cache"
INPUTS = ("src_k", "src_v", "dst_k", "dst_v", "block_mapping")
OUTPUTS = ("dst_k", "dst_v")
HOST_VISIBLE = ()
WORKLOADS = {
    "full": {"NB": 1024, "M": 256, "BS": 32, "H": 8, "D": 256, "free_sources": 64},
    "small": {"NB": 6, "M": 2, "BS": 4, "H": 2, "D": 16, "free_sources": 1},
    "heldout": [
        {"NB": 777, "M": 391, "BS": 16, "H": 5, "D": 72, "free_sources": 391},
        {"NB": 9, "M": 1, "BS": 32, "H": 8, "D": 256, "free_sources": 1},
        {"NB": 13, "M": 11, "BS": 3, "H": 5, "D": 24, "free_sources": 11},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    cache = output_specs(shape)[0]
    return cache, cache, cache, cache, ((shape["M"], 2), torch.int64)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    cache = (shape["NB"], shape["BS"], shape["H"], shape["D"]), torch.uint8
    return cache, cache


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Random bytes; destinations and sources from one random order of pages, in ``INPUTS``' order.

    The first ``free_sources`` pairs have any page for a source instead: sources repeat and are destinations, too.
    """
    sizes, _ = output_specs(shape)[0]
    caches = [integers(generator, *sizes, high=256, dtype=torch.uint8) for _ in range(4)]
    pairs, free = shape["M"], shape["free_sources"]
    order = permutation(generator, shape["NB"], torch.int64)
    chosen = integers(generator, free, high=shape["NB"], dtype=torch.int64)
    sources = torch.cat((chosen, order[pairs : 2 * pairs - free]))
    return *caches, torch.stack((sources, order[:pairs]), dim=1)


def reference(
    src_k: torch.Tensor, src_v: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor, block_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula."""
    sources, destinations = block_mapping.unbind(dim=1)
    new_k, new_v = dst_k.clone(), dst_v.clone()
    new_k[destinations] = src_k[sources]
    new_v[destinations] = src_v[sources]
    return new_k, new_v


def COST(shape: Shape) -> Cost:
    """Each page of the outputs read from one place and written; nothing is computed, and no count is below 1."""
    page = shape["BS"] * shape["H"] * shape["D"]
    return Cost(bytes=4 * shape["NB"] * page + 16 * shape["M"], flops=1, unit="fp32")
