"""Every problem of the catalog keeps the contract of ``problems/contract.py``."""

from __future__ import annotations

import re

import pytest

from mkb_env.judge import qualify
from mkb_env.problems.contract import DSLS, FAMILIES, catalog, find, load, load_checks
from mkb_env.task import brief

SLUGS = tuple(catalog())
CASES = [(slug, *place) for slug in SLUGS for place in qualify.quick_shapes(load(slug))]
"""Every shape that a CPU runs in a moment."""


def test_numbers_are_unique() -> None:
    numbers = [load(slug).number for slug in SLUGS]
    assert len(set(numbers)) == len(numbers) > 0
    assert {find(slug).family for slug in SLUGS} <= set(FAMILIES)


@pytest.mark.parametrize("slug", SLUGS)
class TestFile:
    """What holds for a problem as a whole."""

    def test_text(self, slug: str) -> None:
        qualify.check_text(load(slug))

    def test_workloads(self, slug: str) -> None:
        qualify.check_workloads(load(slug))

    def test_specs(self, slug: str) -> None:
        qualify.check_specs(load(slug))

    def test_cost(self, slug: str) -> None:
        qualify.check_cost(load(slug), load_checks(slug))

    def test_kernels_carry_a_canary(self, slug: str) -> None:
        for dsl in DSLS:
            if path := find(slug).baseline(dsl):
                assert re.search(r"^# mkb-baseline-canary [0-9a-f-]{36}$", path.read_text(), re.M)

    def test_the_task_shows_the_shapes_without_names_of_the_file(self, slug: str) -> None:
        for workload in ("small", "full"):
            assert eval(brief(slug).shape_source(workload), {}) == load(slug).workloads[workload]

    def test_unknown_workload_is_refused(self, slug: str) -> None:
        with pytest.raises(ValueError, match="workload must be one of"):
            load(slug).shapes("medium")


@pytest.mark.parametrize(("slug", "workload", "index"), CASES)
class TestShape:
    """What holds for each shape."""

    def test_draws(self, slug: str, workload: str, index: int) -> None:
        qualify.check_draws(load(slug), load(slug).shapes(workload)[index])

    def test_reference(self, slug: str, workload: str, index: int) -> None:
        qualify.check_reference(load(slug), load(slug).shapes(workload)[index])

    def test_independent(self, slug: str, workload: str, index: int) -> None:
        qualify.check_independent(load(slug), load_checks(slug), load(slug).shapes(workload)[index])


@pytest.mark.parametrize("slug", SLUGS)
def test_variants(slug: str) -> None:
    """Faults are rejected and other right ways accepted on ``small``."""
    qualify.check_variants(load(slug), load_checks(slug), load(slug).shapes("small")[0])
