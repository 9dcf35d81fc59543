"""Every problem of the catalog keeps the contract of ``problems/contract.py``."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch

from mkb_env.judge.draws import anchors, expected
from mkb_env.judge.tolerance import compare
from mkb_env.plan import DTYPE_BYTES
from mkb_env.problems.contract import DSLS, FAMILIES, Problem, Shape, catalog, find, load

SLUGS = tuple(catalog())
CASES = [(slug, w, i) for slug in SLUGS for w in ("small", "heldout") for i in range(len(load(slug).shapes(w)))]
"""Every shape that a CPU can run."""


def draw(problem: Problem, shape: Shape, seed: int = 0) -> tuple[Any, ...]:
    """``solve``'s arguments on the CPU."""
    return tuple(problem.make_inputs(torch.Generator().manual_seed(seed), shape))


@cache
def results(slug: str, workload: str, index: int) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Inputs and the reference's outputs, computed once for all tests."""
    problem = load(slug)
    shape = problem.shapes(workload)[index]
    inputs = draw(problem, shape)
    return inputs, expected(problem, shape, inputs)


def tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among ``values``."""
    return [value for value in values if isinstance(value, torch.Tensor)]


def same(left: Any, right: Any) -> bool:
    """Equal values, dtypes and shapes; NaN equals NaN."""
    if not isinstance(left, torch.Tensor):
        return type(left) is type(right) and left == right
    return left.dtype is right.dtype and torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))


def test_catalog_is_not_empty() -> None:
    assert SLUGS
    assert {find(slug).family for slug in SLUGS} <= set(FAMILIES)


def test_numbers_are_unique() -> None:
    numbers = [load(slug).number for slug in SLUGS]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("slug", SLUGS)
class TestContract:
    """What holds for a problem as a whole."""

    def test_workloads_are_json(self, slug: str) -> None:
        problem = load(slug)
        assert set(problem.workloads) == {"full", "small", "heldout"}
        assert json.loads(json.dumps(problem.workloads)) == problem.workloads
        assert isinstance(problem.workloads["heldout"], list) and problem.workloads["heldout"]

    def test_task_names_everything(self, slug: str) -> None:
        problem = load(slug)
        for name in (*problem.inputs, *problem.outputs):
            assert re.search(rf"\b{re.escape(name)}\b", problem.task), f"the task text does not mention {name}"
        assert set(problem.host_visible) <= set(problem.inputs)

    def test_cost_is_positive(self, slug: str) -> None:
        problem = load(slug)
        for workload in problem.workloads:
            for shape in problem.shapes(workload):
                cost = problem.cost(shape)
                assert cost.bytes > 0 and cost.flops > 0
                assert cost.unit in ("bf16", "fp8", "tf32", "fp32")

    def test_both_kernels_exist(self, slug: str) -> None:
        for dsl in DSLS:
            path = find(slug).baseline(dsl)
            assert path is not None, f"{slug} lacks {dsl}.py"
            assert re.search(r"^# mkb-baseline-canary [0-9a-f-]{36}$", path.read_text(), re.M)

    def test_unknown_workload_is_refused(self, slug: str) -> None:
        with pytest.raises(ValueError, match="workload must be one of"):
            load(slug).shapes("medium")


@pytest.mark.parametrize(("slug", "workload", "index"), CASES)
class TestInputs:
    """What ``make_inputs`` draws."""

    def test_follow_the_generator_alone(self, slug: str, workload: str, index: int) -> None:
        problem = load(slug)
        shape = problem.shapes(workload)[index]
        torch.manual_seed(1)
        first = draw(problem, shape)
        torch.manual_seed(2)
        again, other = draw(problem, shape), draw(problem, shape, seed=1)
        assert len(first) == len(problem.inputs)
        assert all(same(a, b) for a, b in zip(first, again, strict=True))
        assert not all(same(a, b) for a, b in zip(first, other, strict=True)), "two seeds gave the same inputs"

    def test_geometry_is_fixed(self, slug: str, workload: str, index: int) -> None:
        problem = load(slug)
        shape = problem.shapes(workload)[index]
        for name, a, b in zip(problem.inputs, draw(problem, shape), draw(problem, shape, seed=1), strict=True):
            if isinstance(a, torch.Tensor):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if name in problem.host_visible:
                assert a.dtype in (torch.int32, torch.int64)
            if name in problem.host_visible or not isinstance(a, torch.Tensor):
                assert same(a, b), f"{name} is visible to the host, so the seed must not change it"

    def test_are_plain(self, slug: str, workload: str, index: int) -> None:
        problem = load(slug)
        shape = problem.shapes(workload)[index]
        inputs = draw(problem, shape)
        for name, value in zip(problem.inputs, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                assert value.is_contiguous(), name
                assert str(value.dtype).removeprefix("torch.") in DTYPE_BYTES, name
            else:
                assert isinstance(value, (bool, int, float)), name
        storages = [t.untyped_storage().data_ptr() for t in tensors(inputs) if t.numel()]
        assert len(set(storages)) == len(storages), "two inputs share memory"


@pytest.mark.parametrize(("slug", "workload", "index"), CASES)
class TestReference:
    """What ``reference`` returns."""

    def test_outputs(self, slug: str, workload: str, index: int) -> None:
        problem, (inputs, outputs) = load(slug), results(slug, workload, index)
        assert len(outputs) == len(problem.outputs)
        owned = {t.untyped_storage().data_ptr() for t in tensors(inputs)}
        for name, output in zip(problem.outputs, outputs, strict=True):
            assert output.is_contiguous(), name
            assert not output.isnan().any(), name
            assert output.untyped_storage().data_ptr() not in owned, f"{name} aliases an input"

    def test_inputs_are_unchanged(self, slug: str, workload: str, index: int) -> None:
        problem, (inputs, _) = load(slug), results(slug, workload, index)
        fresh = draw(problem, problem.shapes(workload)[index])
        assert all(same(a, b) for a, b in zip(inputs, fresh, strict=True))

    def test_passes_against_its_own_anchor(self, slug: str, workload: str, index: int) -> None:
        problem, (inputs, outputs) = load(slug), results(slug, workload, index)
        for position, truth in enumerate(anchors(problem, inputs, outputs)):
            assert compare(problem, position, outputs[position], outputs[position], truth).passed

    def test_zeros_fail(self, slug: str, workload: str, index: int) -> None:
        problem, (inputs, outputs) = load(slug), results(slug, workload, index)
        for position, truth in enumerate(anchors(problem, inputs, outputs)):
            zeros = torch.zeros_like(outputs[position])
            if truth.count_nonzero():
                assert not compare(problem, position, zeros, outputs[position], truth).passed
