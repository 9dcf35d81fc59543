"""The allowance admits every honest way to compute the first problems, and none of the wrong ones."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import toy

from mkb_env.judge import draws, tolerance
from mkb_env.judge.tolerance import QuickRule, compare, outside_mask, row_length
from mkb_env.problems.contract import Allowance, Problem, Shape, load, load_checks

CPU = torch.device("cpu")
ADD_NORM = "fused_add_rmsnorm_h4096_llama31_8b_bf16"
NORM = "rmsnorm_h128_qwen3_30b_bf16"
DECODE = "gqa_paged_decode_h32_kv8_d128_ps1_bf16"


def judged(problem: Problem, shape: Shape, compute: Any, seed: int = 1) -> list[tuple[tolerance.Comparison, bool]]:
    """Per output the full comparison and the quick rule's answer."""
    inputs = draws.draw(problem, shape, seed, CPU)
    reference = draws.expected(problem, shape, inputs)
    anchors = draws.anchors(problem, inputs, reference)
    results = []
    for position, got in enumerate(draws.leaves(compute(*inputs))):
        want, truth = reference[position], anchors[position]
        rule = QuickRule.learn([compare(problem, position, want, want, truth)], want.dtype)
        found = compare(problem, position, got, want, truth)
        assert found.outside == int(outside_mask(problem, position, got, want, truth).sum())
        results.append((found, bool(rule.holds(problem, position, got, want))))
    return results


ADD_NORM_ODD = {"T": 40, "cancelling_rows": 3, "large_rows": 2, "small_rows": 2}
NORM_ODD = {"R": 300, "zero_rows": 3, "large_rows": 2, "small_rows": 2}
DECODE_ODD = {"lengths": [0, 1, 2000, 129], "P": 2500, "sm_scale": 0.1, "poison": True}
CASES = [
    (slug, shape, load_checks(slug).SECOND, load_checks(slug).WRONG)
    for slug, odd in ((ADD_NORM, ADD_NORM_ODD), (NORM, NORM_ODD), (DECODE, DECODE_ODD))
    for shape in ("small", odd)
]


def cases(column: int) -> list[Any]:
    return [
        pytest.param(slug, shape, compute, id=f"{slug[:12]} {shape if shape == 'small' else 'odd'} {name}")
        for slug, shape, *kinds in CASES
        for name, compute in kinds[column].items()
    ]


def rules(slug: str, workload: str | Shape) -> tuple[list[Problem], Shape]:
    """The problem with its own allowance and with the general rule, and the shape."""
    problem = load(slug)
    shape = problem.shapes(workload)[0] if isinstance(workload, str) else workload
    return [problem, dataclasses.replace(problem, allowance=None)], shape


@pytest.mark.parametrize(("slug", "workload", "compute"), cases(0))
def test_honest_kernels_pass_with_room_to_spare(slug: str, workload: str | Shape, compute: Any) -> None:
    (own, general), shape = rules(slug, workload)
    for found, quick in judged(own, shape, compute):
        assert found.passed and quick
        assert found.share < 0.5, "an honest kernel uses less than half of its allowance"
    for found, quick in judged(general, shape, compute):
        assert found.passed and quick


@pytest.mark.parametrize(("slug", "workload", "compute"), cases(1))
def test_wrong_kernels_fail(slug: str, workload: str | Shape, compute: Any) -> None:
    problems, shape = rules(slug, workload)
    for problem in problems:
        assert not all(found.passed for found, _ in judged(problem, shape, compute))


def test_a_missing_epsilon_shows_in_small_rows() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return (x * x.square().mean(-1, keepdim=True).rsqrt() * weight.float()).nan_to_num(0).bfloat16()

    [(found, _)] = judged(load(NORM), NORM_ODD, norm)
    assert not found.passed


def toy_compare(got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor | None = None) -> tolerance.Comparison:
    return compare(toy.problem(), 0, got, want, want.double() if truth is None else truth)


def test_a_zero_row_must_be_zero() -> None:
    want = torch.randn(4, 64).bfloat16()
    want[2] = 0
    got = want.clone()
    assert toy_compare(got, want).passed
    got[2, 5] = 1e-30
    found = toy_compare(got, want)
    assert (found.outside, found.worst, found.share) == (1, 2 * 64 + 5, math.inf)


def test_small_rows_have_their_own_scale() -> None:
    want = torch.randn(10, 128) * torch.logspace(-4, 4, 10)[:, None]
    got = want.clone()
    got[0, 3] += 1e-6
    found = toy_compare(got.bfloat16(), want.bfloat16(), want.double())
    assert found.passed
    got[0] = 0
    assert toy_compare(got.bfloat16(), want.bfloat16(), want.double()).outside >= 100


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_must_be_in_their_places(value: float) -> None:
    want = torch.randn(3, 40)
    want[1, 7] = value
    assert toy_compare(want.clone(), want).passed
    for wrong in (0.0, math.nan, math.inf, -math.inf):
        if wrong == value or (math.isnan(wrong) and math.isnan(value)):
            continue
        got = want.clone()
        got[1, 7] = wrong
        found = toy_compare(got, want)
        assert (found.outside, found.worst, found.error) == (1, 47, math.inf)
        rule = QuickRule.learn([toy_compare(want, want)], want.dtype)
        assert rule.special and not rule.holds(toy.problem(), 0, got, want)
        assert rule.holds(toy.problem(), 0, want.clone(), want)
    stray = want.clone()
    stray[0, 0] = value
    assert toy_compare(stray, want).outside == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8])
def test_integers_are_exact(dtype: torch.dtype) -> None:
    want = torch.arange(70).reshape(7, 10).remainder(2 if dtype is torch.bool else 100).to(dtype)
    got = want.clone()
    assert compare(toy.problem(), 0, got, want, want).passed
    got[3, 4] = not got[3, 4] if dtype is torch.bool else got[3, 4] + 1
    found = compare(toy.problem(), 0, got, want, want)
    assert (found.passed, found.outside, found.worst, found.error) == (False, 1, 34, 1.0)


def test_neighbouring_large_integers_are_told_apart() -> None:
    want = torch.tensor([2**62, 5])
    assert compare(toy.problem(), 0, want + torch.tensor([1, 0]), want, want).outside == 1


def test_correct_fp32_kernels_survive_many_rows() -> None:
    # Sums in another order: about as wrong as the reference, but elsewhere. Per-row luck must not decide.
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(20000, 256, generator=generator), torch.randn(256, 32, generator=generator)
    want, truth = left @ right, left.double() @ right.double()
    order = torch.randperm(256, generator=generator)
    other = sum(left[:, part] @ right[part] for part in order.split(16))
    found = toy_compare(other, want, truth)
    assert found.passed and found.share < 0.8


def test_short_rows_are_merged_until_they_have_a_scale() -> None:
    assert [row_length(s) for s in ((5, 4096), (3, 32), (100, 8), (2, 3, 4, 8), (7,), (), (50, 1))] == [
        4096, 32, 800, 32, 7, 1, 50,
    ]  # fmt: skip


def test_empty_and_scalar_outputs() -> None:
    assert toy_compare(torch.empty(0, 64), torch.empty(0, 64)).passed
    assert toy_compare(torch.tensor(1.0), torch.tensor(1.0)).passed
    assert not toy_compare(torch.tensor(1.1), torch.tensor(1.0)).passed


def test_chunks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    want = torch.randn(37, 64)
    got = want + 0.001 * torch.randn(37, 64)
    whole = toy_compare(got.bfloat16(), want.bfloat16(), want.double())
    monkeypatch.setattr(tolerance, "CHUNK", 200)
    assert toy_compare(got.bfloat16(), want.bfloat16(), want.double()) == whole


def test_a_problems_own_allowance_replaces_the_rule_and_admits_nothing_by_nan() -> None:
    want = torch.randn(4, 64)
    loose = toy.problem(allowance=lambda name, inputs, reference, anchor: torch.full_like(anchor, 0.5))
    assert compare(loose, 0, want + 0.4, want, want.double()).passed
    assert not compare(loose, 0, want + 0.6, want, want.double()).passed
    undecided = toy.problem(allowance=lambda name, inputs, reference, anchor: None)
    assert not compare(undecided, 0, want + 0.4, want, want.double()).passed
    broken = toy.problem(allowance=lambda name, inputs, reference, anchor: torch.full_like(anchor, math.nan))
    assert not compare(broken, 0, want + 0.4, want, want.double()).passed


def test_few_elements_may_exceed_the_usual_bound() -> None:
    want = torch.zeros(4, 64)

    def allowance(name: str, inputs: Any, reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
        return Allowance(torch.full_like(anchor, 1.0), torch.full_like(anchor, 0.25), share=0.01)

    problem = toy.problem(allowance=allowance)
    rule = QuickRule.learn([compare(problem, 0, want, want, want.double())], want.dtype)
    for count, size, passes in ((2, 1.0, True), (3, 1.0, False), (1, 1.1, False), (256, 0.25, True)):
        got = want.clone()
        got.view(-1)[:count] = size
        found = compare(problem, 0, got, want, want.double())
        assert found.passed is passes
        assert bool(rule.holds(problem, 0, got, want)) is passes or size == 1.1
        assert found.outside == (0 if passes else count)
        assert int(outside_mask(problem, 0, got, want, want.double()).sum()) == found.outside


def test_an_error_in_a_row_of_zeros_is_the_worst() -> None:
    want = torch.randn(4, 64)
    want[2] = 0
    got = want.clone()
    got[2, 7] = 1.0
    found = toy_compare(got, want)
    assert (found.passed, found.worst, found.outside, found.share) == (False, 2 * 64 + 7, 1, math.inf)
