"""What ``mkb doctor`` looks at. Nothing here imports torch or a DSL into this process."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from mkb_env.judge.client import Judge
    from mkb_env.judge.roofline import Ceilings

KNOWN_GOOD = "rmsnorm_h128_qwen3_30b_bf16"
"""The problem whose kernels are judged: the smallest."""

LAYERS = ("memory", "network", "processes", "files")
PROBE_LAYERS = """
import os, pathlib, sys, tempfile
from mkb_env.recorder.sandbox import confine
with tempfile.TemporaryDirectory() as scratch:
    if os.fork() == 0:  # as the recorder does: a fresh fork has one thread, which user namespaces ask for
        print(*confine(1 << 32, pathlib.Path(scratch)), flush=True)
        os._exit(0)
    os.wait()
"""


class Check(msgspec.Struct, frozen=True):
    """One line of the doctor's report."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    """What to do about it, where something is missing."""
    required: bool = True
    """Whether judging is impossible without it."""


def examine(judge: Judge) -> list[Check]:
    """All checks, in the order in which a missing piece explains the later ones."""
    return [_python(), *_packages(), _libraries(), _sandbox(), _gpu(), *_kernels(judge)]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("Python", ok, f"{found}, needs 3.11 or later", "" if ok else "install a newer Python")


def _packages() -> Iterator[Check]:
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("mkb-env") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Check("mkb-env", False, "not installed", "pip install -e . in the folder of the sources")
        return
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(requirement.name, False, f"not installed, needs {requirement.specifier}", fix)
            continue
        ok = requirement.specifier.contains(found, prereleases=True)
        yield Check(requirement.name, ok, f"{found}, needs {requirement.specifier}", "" if ok else fix)


def _libraries() -> Check:
    from mkb_env.recorder import libraries

    found = sorted(path.name for path in libraries.FOLDER.glob("*.so*"))
    ok = len(found) == 3
    fix = "" if ok else "install a C compiler, then pip install --force-reinstall --no-deps -e ."
    return Check("recorder's C libraries", ok, ", ".join(found) or f"none in {libraries.FOLDER}", fix)


def _sandbox() -> Check:
    done = subprocess.run([sys.executable, "-c", PROBE_LAYERS], capture_output=True, text=True, timeout=60, check=False)
    found = done.stdout.split()
    missing = [layer for layer in LAYERS if layer not in found]
    detail = f"in force: {', '.join(found) or 'nothing'}"
    if not missing:
        return Check("sandbox", True, detail, required=False)
    fix = (
        f"without {', '.join(missing)} a submission's host code is less confined: "
        "allow unprivileged user namespaces and Landlock, or judge only sources you trust"
    )
    return Check("sandbox", False, detail or done.stderr[-300:], fix, required=False)


def _gpu() -> Check:
    from mkb_env.devices.cuda import available

    reason = available()
    fix = "" if reason is None else "without a GPU, submissions run in the simulator: outputs are real, times estimates"
    return Check("NVIDIA GPU", reason is None, reason or "usable", fix, required=False)


def _kernels(judge: Judge) -> Iterator[Check]:
    from mkb_env.dsl import NAMES, get
    from mkb_env.problems import find

    for dsl in NAMES:
        name = f"a {get(dsl).TITLE} kernel"
        file = find(KNOWN_GOOD).baseline(dsl)
        if file is None:
            yield Check(name, False, f"{KNOWN_GOOD} has no {dsl} kernel", "reinstall mkb-env")
            continue
        verdict = judge.judge(file.read_text(encoding="utf-8"), KNOWN_GOOD, dsl)
        detail = f"{verdict.stage.value} on {verdict.device or judge.device} in {verdict.seconds.get('total', 0):.1f} s"
        yield Check(name, verdict.passed, detail, "" if verdict.passed else verdict.message)


def show_checks(checks: list[Check], healthy: bool) -> None:
    """The report for a person: a line per check, what to do on a line of its own; no line is cut or squeezed."""
    for check in checks:
        mark = "ok" if check.ok else "MISSING" if check.required else "note"
        print(f"{mark:<8}{check.name}: {check.detail}")
        if check.fix:
            print(textwrap.fill(f"-> {check.fix}", 79, initial_indent=" " * 8, subsequent_indent=" " * 11))
    print("This machine can judge." if healthy else "This machine cannot judge: see above.")


def show_ceilings(ceilings: Ceilings, kept: str) -> None:
    """Print what was measured."""
    print(f"{ceilings.device}: {ceilings.bytes_per_us / 1e6:.2f} TB/s copied")
    for unit, rate in ceilings.flops_per_us.items():
        print(f"  {unit} products: {rate / 1e6:.0f} TFLOP/s")
    print(f"kept in {kept}; rooflines of later verdicts on this device go by it")
