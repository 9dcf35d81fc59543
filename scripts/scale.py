"""Measure the constants of docs/scale.md: what a verdict costs on each side, in CPU seconds and bytes.

Usage: python scripts/scale.py --device ray:simulator --count 40 [--workload small] [--dsl cute] [--problem SLUG]

Sources are made new by a comment, so each is compiled. Submissions go one at a time, then --threads at a time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from mkb_env.judge.bench import fresh
from mkb_env.judge.client import Judge
from mkb_env.judge.pipeline import Pipeline
from mkb_env.judge.workers import Workers
from mkb_env.recorder.protocol import Recording, RecordRequest
from mkb_env.servers.client import Outcome
from mkb_env.servers.wire import runtime_folder

TICKS = os.sysconf("SC_CLK_TCK")
ROLES = {
    "recorder.service": "recorder",
    "judge.evaluator": "evaluator",
    "ray::Station": "actors",
    "raylet/raylet": "raylets",
    "gcs_server": "head (GCS)",
}


class Counted:
    """A recorder and an evaluator that count the bytes that pass, and the seconds."""

    def __init__(self, workers: Workers, sums: Counter[str]) -> None:
        self.recorder, self.evaluator, self.sums = workers.recorder, workers.evaluator, sums

    def record(
        self, request: RecordRequest, on_progress: Callable[[str], None] | None = None, priority: int = 0
    ) -> Recording:
        begin = time.monotonic()
        recording = self.recorder.record(request, on_progress, priority)
        self.sums["record: wall s"] += time.monotonic() - begin  # type: ignore[assignment]
        self.sums["record: request bytes"] += len(msgspec.msgpack.encode(request))
        self.sums["record: answer bytes"] += len(msgspec.msgpack.encode(recording))
        return recording

    def call(self, payload: bytes, **how: Any) -> Outcome:
        begin = time.monotonic()
        outcome = self.evaluator.call(payload, **how)
        self.sums["evaluate: wall s"] += time.monotonic() - begin  # type: ignore[assignment]
        self.sums["evaluate: request bytes"] += len(payload)
        self.sums["evaluate: answer bytes"] += len(outcome.result or b"")
        return outcome


def cpu_seconds() -> Counter[str]:
    """CPU seconds so far by role: of this installation's servers and Ray's processes, ended children included."""
    found: Counter[str] = Counter()
    folder = str(runtime_folder())
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            times = process.joinpath("stat").read_text().rpartition(")")[2].split()[11:15]
        except OSError:  # it has ended
            continue
        for mark, role in ROLES.items():
            if mark in command and (folder in command or "mkb_env.servers" not in command):
                found[role] += sum(map(int, times)) / TICKS  # type: ignore[assignment]
    found["driver"] = time.process_time()  # type: ignore[assignment]
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="ray")
    parser.add_argument("--problem", default="rmsnorm_h128_qwen3_30b_bf16")
    parser.add_argument("--dsl", default="cute", choices=["cute", "tirx"])
    parser.add_argument("--workload")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="recordings at a time; default: what the device has")
    asked = parser.parse_args()
    judge = Judge(asked.device)
    sources = fresh(asked.problem, asked.dsl, asked.workload or judge.default_workload)
    sums: Counter[str] = Counter()
    for _ in range(3):  # warm
        one = next(sources)
        judge.judge(one.source, one.problem, one.dsl, one.workload)
    counted = Counted(judge.workers, sums)
    judge._workers = replace(judge.workers, recorder=counted, evaluator=counted)
    before, walls, failed = cpu_seconds(), [], 0
    for one in itertools.islice(sources, asked.count):
        verdict = judge.judge(one.source, one.problem, one.dsl, one.workload)
        walls.append(verdict.seconds["total"])
        failed += not verdict.passed
    spent = cpu_seconds()
    print(f"{asked.problem}, {asked.dsl}, {one.workload}, {judge.device_name}: {asked.count} verdicts, {failed} failed")
    print(f"one at a time: p50 {statistics.median(walls):.4f} s")
    for name, value in sorted(sums.items()):
        print(f"  {name:24} {value / asked.count:12.4f}")
    for role in sorted(spent):
        print(f"  CPU s, {role:17} {(spent[role] - before[role]) / asked.count:12.4f}")
    with Pipeline([asked.device], recorders=asked.threads or None) as pipeline:
        before, begin = cpu_seconds(), time.monotonic()
        passed = sum(v.passed for _, v in pipeline.judge(itertools.islice(sources, asked.count)))
        took, spent = time.monotonic() - begin, cpu_seconds()
    print(f"side by side: {asked.count / took:.2f} verdicts/s, {asked.count - passed} failed")
    for role in sorted(spent):
        print(f"  CPU s, {role:17} {(spent[role] - before[role]) / asked.count:12.4f}")


if __name__ == "__main__":
    main()
