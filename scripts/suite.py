#!/usr/bin/env python3
"""Record every baseline kernel and every planted fault as plans here; judge them there.

    python scripts/suite.py record plans/             # needs both DSLs, no GPU
    python scripts/suite.py replay plans/ --device cuda   # needs torch, no DSL; exit 1 on any surprise
    python scripts/suite.py fixtures plans/ tests/sim/fixtures --device cuda

A kernel must pass on every workload (``--repeat`` times); a fault must lose the verdict on at least one of them.
``fixtures`` keeps a device's raw outputs for ``small``, to hold the simulator against.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "judge")]

import msgspec  # noqa: E402
from mutants import MUTANTS  # noqa: E402

from mkb_env.judge.client import Judge  # noqa: E402
from mkb_env.plan import decode, encode  # noqa: E402
from mkb_env.problems import find  # noqa: E402

HELDOUT_SHAPES = 2
WORKLOADS = ("small", "heldout", "full")
KERNEL = "kernel"
CAUGHT = ("incorrect", "launch_error")


class Entry(msgspec.Struct):
    """One recorded plan."""

    problem: str
    dsl: str
    fault: str
    """``kernel`` for the unchanged source."""
    workload: str
    shape: int
    file: str


def sources() -> list[tuple[str, str, str, str]]:
    """(problem, dsl, fault, source) of every kernel and fault."""
    found = []
    for (slug, dsl), mutants in MUTANTS.items():
        path = find(slug).baseline(dsl)
        assert path is not None
        text = path.read_text().replace("mkb-baseline-canary", "recorded for the suite:")
        found.append((slug, dsl, KERNEL, text))
        found += [(slug, dsl, mutant.name, mutant.apply(text)) for mutant in mutants]
    return found


def record(folder: Path, workloads: list[str]) -> None:
    """Write the plans and their index; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    judge, entries = Judge("simulator"), []
    for number, (slug, dsl, fault, source) in enumerate(sources()):
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        for workload in workloads:
            for shape in range(HELDOUT_SHAPES if workload == "heldout" else 1):
                file = f"{number:03}-{digest}-{workload}{shape}.plan"
                entries.append((Entry(slug, dsl, fault, workload, shape, file), source))

    def one(job: tuple[Entry, str]) -> None:
        entry, source = job
        path = folder / entry.file
        if not path.exists():
            plan = judge.record(source, entry.problem, entry.dsl, entry.workload, shape=entry.shape)
            path.write_bytes(encode(plan))
            print(entry.problem, entry.dsl, entry.fault, entry.workload, file=sys.stderr)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, entries))
    (folder / "index.json").write_bytes(msgspec.json.encode([entry for entry, _ in entries]))


def load(folder: Path) -> list[Entry]:
    """The index of a folder of plans."""
    return msgspec.json.decode((folder / "index.json").read_bytes(), type=list[Entry])


def replay(folder: Path, device: str, repeat: int, timing: bool, workloads: list[str], only: str) -> int:
    """Judge the plans of ``workloads``; the number of surprises. ``only``: ``kernel`` or ``fault``, else both."""
    judge, surprises = Judge(device), 0
    entries = [
        e for e in load(folder) if e.workload in workloads and only in ("", "fault" if e.fault != KERNEL else KERNEL)
    ]
    for slug, dsl, fault in dict.fromkeys((e.problem, e.dsl, e.fault) for e in entries):
        results = []
        for entry in (e for e in entries if (e.problem, e.dsl, e.fault) == (slug, dsl, fault)):
            plan = decode((folder / entry.file).read_bytes())
            for _ in range(repeat if fault == KERNEL else 1):
                started = time.monotonic()
                verdict = judge.replay(plan, slug, entry.workload, shape=entry.shape, timing=timing and fault == KERNEL)
                results.append((entry, verdict, time.monotonic() - started))
            if fault != KERNEL and verdict.stage.value in CAUGHT:
                break
        stages = [verdict.stage.value for _, verdict, _ in results]
        good = all(s == "passed" for s in stages) if fault == KERNEL else stages[-1] in CAUGHT
        surprises += not good
        for entry, verdict, seconds in results if fault == KERNEL else results[-1:]:
            row = {"problem": slug, "dsl": dsl, "fault": fault, "workload": f"{entry.workload}{entry.shape}"}
            row |= {"as_expected": good, "stage": verdict.stage.value, "message": verdict.message[:160]}
            row |= {"seconds": round(seconds, 3), **verdict.seconds}
            print(json.dumps(row), flush=True)
    return surprises


def fixtures(folder: Path, out: Path, device_name: str) -> None:
    """Keep the outputs of every kernel on ``small``, for inputs drawn on the CPU from a fixed seed."""
    import numpy as np
    import torch

    from mkb_env.problems import load as load_problem

    if device_name.startswith("cuda"):
        from mkb_env.devices.cuda import CudaDevice

        device = CudaDevice(0)
    else:
        from mkb_env.devices.simulator import SimulatorDevice

        device = SimulatorDevice()
    out.mkdir(parents=True, exist_ok=True)
    for entry in load(folder):
        if entry.fault != KERNEL or entry.workload != "small":
            continue
        plan = (folder / entry.file).read_bytes()
        problem = load_problem(entry.problem)
        values = problem.make_inputs(torch.Generator().manual_seed(1), problem.shapes("small")[0])
        loaded = device.load(decode(plan))
        bound = loaded.bind([v.to(device.torch_device) if isinstance(v, torch.Tensor) else v for v in values])
        bound.poison()
        bound.run()
        device.synchronize()
        raw = [t.cpu().contiguous().flatten().view(torch.uint8).numpy() for t in bound.outputs]
        arrays = {f"output{i}": array for i, array in enumerate(raw)}
        plan_array = np.frombuffer(plan, dtype=np.uint8)
        np.savez_compressed(out / f"{entry.problem}.{entry.dsl}.npz", plan=plan_array, device=device.name, **arrays)
        print(entry.problem, entry.dsl, device.name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "replay", "fixtures"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="folder of the fixtures")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="default: all; full takes long on the simulator"
    )
    parser.add_argument("--only", choices=[KERNEL, "fault"], default="", help="replay: kernels or faults alone")
    parser.add_argument("--repeat", type=int, default=1, help="verdicts per unchanged kernel and shape")
    parser.add_argument("--no-timing", action="store_true")
    options = parser.parse_args()
    workloads = options.workload or list(WORKLOADS)
    if options.action == "record":
        record(options.folder, workloads)
    elif options.action == "replay":
        surprises = replay(
            options.folder, options.device, options.repeat, not options.no_timing, workloads, options.only
        )
        print(f"{surprises} surprises", file=sys.stderr)
        sys.exit(bool(surprises))
    else:
        if options.out is None:
            parser.error("fixtures needs the folder to write to")
        fixtures(options.folder, options.out, options.device)


if __name__ == "__main__":
    main()
