"""References of the family attention against independent computations."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from mkb_env.judge.tolerance import compare
from mkb_env.problems.contract import Problem, load

DECODE = "gqa_paged_decode_h32_kv8_d128_ps1_bf16"


@pytest.fixture(scope="module")
def decode() -> Problem:
    return load(DECODE)


def draw(problem: Problem, workload: str, index: int = 0) -> tuple[Any, ...]:
    """Inputs on the CPU."""
    return problem.make_inputs(torch.Generator().manual_seed(3), problem.shapes(workload)[index])


def widened(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same inputs in float64."""
    return tuple(v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in inputs)


@pytest.mark.parametrize(("workload", "index"), [("small", 0), ("heldout", 0), ("heldout", 1)])
def test_decode_equals_torch(decode: Problem, workload: str, index: int) -> None:
    inputs = widened(draw(decode, workload, index))
    output, lse = decode.reference(*inputs)
    q, k_cache, v_cache, indptr, indices, scale = inputs
    for b, (begin, end) in enumerate(pairwise(indptr.tolist())):
        if begin == end:
            assert not output[b].any() and (lse[b] == -math.inf).all()
            continue
        slots = indices[begin:end].long()
        keys, values = (cache[slots, 0].repeat_interleave(4, dim=1).transpose(0, 1) for cache in (k_cache, v_cache))
        want = torch.nn.functional.scaled_dot_product_attention(q[b, :, None], keys, values, scale=scale)[:, 0]
        torch.testing.assert_close(output[b], want, rtol=1e-9, atol=1e-12)
        logits = (keys @ q[b, :, :, None])[..., 0] * scale
        torch.testing.assert_close(lse[b], logits.exp().sum(-1).log2(), rtol=1e-9, atol=0)


def test_decode_by_hand(decode: Problem) -> None:
    q, k_cache, v_cache, indptr, indices, scale = draw(decode, "small")
    output, lse = decode.reference(*widened((q, k_cache, v_cache, indptr, indices, scale)))
    for b, h, d in ((0, 0, 0), (2, 13, 77), (3, 31, 127)):  # request 1 is empty
        slots = indices[int(indptr[b]) : int(indptr[b + 1])].tolist()
        query = q[b, h].tolist()
        logits = [
            math.fsum(x * y for x, y in zip(query, k_cache[s, 0, h // 4].tolist(), strict=True)) * scale for s in slots
        ]
        weights = [math.exp(value) for value in logits]
        want = math.fsum(w * float(v_cache[s, 0, h // 4, d]) for w, s in zip(weights, slots, strict=True))
        assert float(output[b, h, d]) == pytest.approx(want / math.fsum(weights), rel=1e-9)
        assert float(lse[b, h]) == pytest.approx(math.log2(math.fsum(weights)), rel=1e-12)


def test_decode_types(decode: Problem) -> None:
    output, lse = decode.reference(*draw(decode, "small"))
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


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


def test_decode_allowance_admits_bf16_probabilities_and_no_natural_lse(decode: Problem) -> None:
    inputs = draw(decode, "heldout", 1)
    outputs, truth = decode.reference(*inputs), decode.reference(*widened(inputs))
    q, k_cache, v_cache, indptr, indices, scale = inputs
    rough = torch.zeros_like(outputs[0])
    for b, (begin, end) in enumerate(pairwise(indptr.tolist())):
        slots = indices[begin:end]
        keys, values = (cache[slots, 0].float().repeat_interleave(4, dim=1) for cache in (k_cache, v_cache))
        weights = torch.einsum("hd,mhd->hm", q[b].float(), keys).mul(scale).softmax(-1).bfloat16().float()
        rough[b] = torch.einsum("hm,mhd->hd", weights, values)
    assert not torch.equal(rough, outputs[0])
    assert compare(decode, 0, rough, outputs[0], truth[0]).passed
    assert not compare(decode, 1, outputs[1] * math.log(2), outputs[1], truth[1]).passed
