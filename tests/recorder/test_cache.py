"""Recordings are kept by what made them, survive damage, and are never of failures."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mkb_env.judge.client import Judge
from mkb_env.plan import decode, encode
from mkb_env.recorder.cache import RecordingCache
from mkb_env.recorder.protocol import Call, Failure, OutputSpec, Recording, RecordRequest, TensorInput

CALL = Call((TensorInput((4,), "float32"),), (OutputSpec((4,), "float32"),), False)


def request(source: str = "a", dsl: str = "cute", **call: object) -> RecordRequest:
    return RecordRequest(source, dsl, (CALL,))


def recording(size: int = 10) -> Recording:
    return Recording((b"p" * size,), log="hello", seconds={"solve": 1.0})


def test_the_key_is_everything_that_makes_a_recording(tmp_path: Path) -> None:
    cache = RecordingCache(tmp_path)
    cache.put(request(), recording())
    kept = cache.get(request())
    assert kept is not None and (kept.plans, kept.log, kept.seconds) == ((b"p" * 10,), "hello", {})
    assert cache.get(request("b")) is None and cache.get(request(dsl="tirx")) is None
    longer = Call((TensorInput((5,), "float32"),), CALL.outputs, False)
    assert cache.get(RecordRequest("a", "cute", (longer,))) is None


def test_failures_are_not_kept(tmp_path: Path) -> None:
    cache = RecordingCache(tmp_path)
    cache.put(request(), Recording(failure=Failure("compile_error", "no")))
    assert cache.get(request()) is None and not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_entry_is_recorded_anew(tmp_path: Path, damage: bytes | None) -> None:
    cache = RecordingCache(tmp_path)
    cache.put(request(), recording())
    [path] = tmp_path.glob("??/*")
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert cache.get(request()) is None and not path.exists()
    cache.put(request(), recording())
    assert cache.get(request()) is not None


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = RecordingCache(tmp_path, most_bytes=4000)
    for number, source in enumerate("abc"):
        cache.put(request(source), recording(1500))
        path = cache._path(request(source))
        os.utime(path, (time.time() - 100 + number,) * 2)
    cache.get(request("a"))
    cache.trim()
    assert [cache.get(request(source)) is not None for source in "abc"] == [True, False, True]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = RecordingCache(blocked / "folder")
    cache.put(request(), recording())
    assert cache.get(request()) is None


def test_a_second_judge_does_not_compile_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKB_CACHE_DIR", str(tmp_path))
    slug = "rmsnorm_h128_qwen3_30b_bf16"
    source = Path(__file__).parents[2].joinpath("agents/demo/rmsnorm_cute.py").read_text()
    first = Judge("simulator").judge(source, slug, "cute", timing=False)
    second = Judge("simulator").judge(source, slug, "cute", timing=False)
    assert first.passed and second.passed and first.plan_sha256 == second.plan_sha256
    assert "solve" in first.seconds and "solve" not in second.seconds
    assert second.seconds["record"] < 0.5 * first.seconds["record"]
    again = Judge("simulator").record(source, slug, "cute")
    assert decode(encode(again)) == again
