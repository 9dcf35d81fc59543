"""Our kernels pass the judge, and kernels with one planted fault do not: recorder, simulator and tolerance together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutants import MUTANTS, Mutant

from mkb_env.judge.client import Judge
from mkb_env.judge.verdict import Stage
from mkb_env.problems.contract import DSLS, catalog, find

KERNELS = [(slug, dsl) for slug, ref in catalog().items() for dsl in DSLS if ref.baseline(dsl)]
FAULTS = [
    pytest.param(slug, dsl, mutant, id=f"{slug}-{dsl}-{mutant.name}")
    for (slug, dsl), mutants in MUTANTS.items()
    for mutant in mutants
]
RACES = [fault for fault in FAULTS if isinstance(fault.values[2], Mutant) and fault.values[2].race]
QUICK = [("rmsnorm_h128_qwen3_30b_bf16", "cute"), ("gqa_paged_decode_h32_kv8_d128_ps1_bf16", "cute")]
"""Kernels whose faults that show on ``small`` are planted in every run; the others take minutes."""


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge("simulator")
    yield judge
    judge.close()


def source_of(slug: str, dsl: str) -> str:
    """Our kernel's source."""
    path = find(slug).baseline(dsl)
    assert path is not None
    return path.read_text()


@pytest.mark.parametrize(("slug", "dsl"), KERNELS)
@pytest.mark.parametrize("workload", ["small", pytest.param("heldout", marks=pytest.mark.slow)])
def test_kernel_passes(judge: Judge, slug: str, dsl: str, workload: str) -> None:
    verdict = judge.judge(source_of(slug, dsl), slug, dsl, workload, timing=False, draws=2)
    assert verdict.passed, verdict.message


@pytest.mark.parametrize(("slug", "dsl"), QUICK)
def test_most_faults_show_on_small(judge: Judge, slug: str, dsl: str) -> None:
    mutants = [mutant for mutant in MUTANTS[slug, dsl] if not mutant.race][:6]
    source = source_of(slug, dsl)
    stages = [judge.judge(m.apply(source), slug, dsl, "small", timing=False, draws=1).stage for m in mutants]
    assert set(stages) <= {Stage.INCORRECT, Stage.PASSED}
    assert stages.count(Stage.INCORRECT) >= 4


@pytest.mark.parametrize(("slug", "dsl", "mutant"), RACES)
def test_missing_barriers_show_on_small(judge: Judge, slug: str, dsl: str, mutant: Mutant) -> None:
    """What a warp reads too early may also be an index that leads out of bounds."""
    verdict = judge.judge(mutant.apply(source_of(slug, dsl)), slug, dsl, "small", timing=False)
    assert verdict.stage in (Stage.INCORRECT, Stage.LAUNCH_ERROR), verdict.message


@pytest.mark.slow
@pytest.mark.parametrize(("slug", "dsl", "mutant"), [fault for fault in FAULTS if fault not in RACES])
def test_fault_is_found(judge: Judge, slug: str, dsl: str, mutant: Mutant) -> None:
    source = mutant.apply(source_of(slug, dsl))
    for workload in ("small", "heldout"):
        verdict = judge.judge(source, slug, dsl, workload, timing=False, draws=1)
        if not verdict.passed:
            break
    assert verdict.stage is Stage.INCORRECT, verdict.message
