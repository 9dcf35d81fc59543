"""Sources are read from many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mkb_env.legality import check

SOURCE = (Path(__file__).resolve().parents[2] / "agents" / "demo" / "rmsnorm_cute.py").read_text()


def test_many_threads_read_sources() -> None:
    # Without a lock, CPython's tree builder fails now and then: "AST constructor recursion depth mismatch".
    nested = SOURCE + "\nx = " + "(" * 80 + "1" + ")" * 80 + "\n"
    with ThreadPoolExecutor(16) as pool:
        failures = list(pool.map(lambda n: check(f"{nested}# {n}\n", "cute"), range(300)))
    assert failures == [None] * 300
