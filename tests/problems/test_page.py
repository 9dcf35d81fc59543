"""docs/problems.md is what the problems' own files say."""

from __future__ import annotations

from pathlib import Path

from mkb_env.judge.facts import facts
from mkb_env.judge.page import page
from mkb_env.problems import FAMILIES, catalog, load, load_checks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "problems.md"
SIZES = {
    "attention": 18,
    "kv_cache": 8,
    "mlp_norm": 17,
    "moe": 8,
    "quantized_projection": 10,
    "linear_attention": 13,
}


def test_the_catalog_is_complete() -> None:
    families = [ref.family for ref in catalog().values()]
    assert {family: families.count(family) for family in FAMILIES} == SIZES
    assert sorted(load(slug).number for slug in catalog()) == list(range(1, 75))


def test_the_page_is_current() -> None:
    wanted = page([(facts(load(slug)), load_checks(slug)) for slug in catalog()])
    assert PAGE.read_text(encoding="utf-8") == wanted, "run `python scripts/problems.py page`"


def test_every_dtype_is_named() -> None:
    assert {facts(load(slug)).dtype for slug in catalog()} == {"bf16", "fp32", "fp8", "nvfp4", "uint8", "int32/int64"}
