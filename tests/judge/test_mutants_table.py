"""The table of planted faults fits the kernels."""

from __future__ import annotations

import ast

import pytest
from mutants import MUTANTS

from mkb_env.problems.contract import DSLS, catalog, find


def source_of(slug: str, dsl: str) -> str:
    """Our kernel's source."""
    path = find(slug).baseline(dsl)
    assert path is not None
    return path.read_text()


@pytest.mark.parametrize(("slug", "dsl"), MUTANTS)
def test_every_fault_is_one_change_of_the_source(slug: str, dsl: str) -> None:
    source = source_of(slug, dsl)
    mutants = MUTANTS[slug, dsl]
    assert len(mutants) >= 4
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    faulty = [mutant.apply(source) for mutant in mutants]
    assert len({source, *faulty}) == len(mutants) + 1
    for text in faulty:
        ast.parse(text)


def test_every_kernel_has_faults() -> None:
    assert {(slug, dsl) for slug in catalog() for dsl in DSLS if find(slug).baseline(dsl)} == set(MUTANTS)


def test_unknown_text_is_refused() -> None:
    mutant = next(iter(MUTANTS.values()))[0]
    with pytest.raises(ValueError, match="found it 0 times"):
        mutant.apply("def solve(): ...")
