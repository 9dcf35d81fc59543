"""Where the pages of paged attention lie: what is poisoned, shared, unique."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from mkb_env.problems.contract import Problem, load

DECODE = "gqa_paged_decode_h32_kv8_d128_ps1_bf16"


@pytest.fixture(scope="module")
def decode() -> Problem:
    return load(DECODE)


def draw(problem: Problem, workload: str, index: int = 0) -> tuple[Any, ...]:
    """Inputs on the CPU."""
    return problem.make_inputs(torch.Generator().manual_seed(3), problem.shapes(workload)[index])


def test_decode_poison_fills_unlisted_slots_only(decode: Problem) -> None:
    _, k_cache, v_cache, _, indices, _ = draw(decode, "heldout", 1)
    listed = torch.zeros(len(k_cache), dtype=torch.bool)
    listed[indices.long()] = True
    for cache in (k_cache, v_cache):
        assert cache[~listed].isnan().all() and cache[listed].isfinite().all()


def test_decode_shared_prefix(decode: Problem) -> None:
    _, _, _, indptr, indices, _ = draw(decode, "heldout", 0)
    bounds = list(pairwise(indptr.tolist()))
    prefixes = [tuple(indices[a : a + 64].tolist()) for a, b in bounds if b - a > 64]
    rest = [s for a, b in bounds for s in indices[a + 64 if b - a > 64 else a : b].tolist()]
    assert len(prefixes) == 15 and len(set(prefixes)) == 1
    assert len(set(rest)) == len(rest) and not set(rest) & set(prefixes[0])


def test_decode_unshared_slots_are_unique(decode: Problem) -> None:
    indices = draw(decode, "small")[4]
    assert len(set(indices.tolist())) == len(indices) == 58
    assert indices.min() >= 0 and indices.max() < 64
