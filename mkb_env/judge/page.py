"""``docs/problems.md``: the catalog for people. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from mkb_env.judge.jobs import Facts
from mkb_env.problems import FAMILIES


def magnitude(value: float, unit: str) -> str:
    """A count with its SI prefix: ``326 MB``."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


HEAD = """# The problems

{count} problems in {families} families; each is an environment in each of two DSLs. This page is written by
`python scripts/problems.py page` from the problems' own files, and a test holds it against them.

Bytes and FLOPs are the least that one call at the `full` shape must move and compute (the problem's `COST`); intensity
is their ratio. The time is the longer of the two at an H200's peaks by its datasheet (4.8 TB/s; dense tensor cores bf16
989, fp8 1979, tf32 495 TFLOP/s, 3xtf32, which is float32 by three TF32 products, 165; CUDA cores fp32 67 TFLOP/s): a
bound, not a goal. Where rows are routed, the expected number of rows counts. `mkb show SLUG` prints the task as an
agent sees it; `mkb list --json` has the same figures for programs.
"""
COLUMNS = "| no. | slug | model | dtype | full shape | bytes | FLOPs | FLOP/B | H200 bound, us | kernels here |"
RULE = "| --: | --- | --- | --- | --- | --: | --: | --: | --: | --- |"
PROOFS = """## How each is known to be right

Every problem's fp64 truth is held against the same results by other means; the judge must reject each of its planted
faults and accept each of the other right ways to compute it, at `small` in CI and at `full` on a GPU
(`python scripts/problems.py measure --device cuda`).
"""


def page(problems: Sequence[tuple[Facts, ModuleType]]) -> str:
    """``docs/problems.md``, from each problem's facts and its ``checks`` module."""
    problems = sorted(problems, key=lambda pair: pair[0].number)
    parts = [HEAD.format(count=len(problems), families=len({known.family for known, _ in problems}))]
    for family, stem in FAMILIES.items():
        members = [known for known, _ in problems if known.family == family]
        parts.append(
            f"## {family} ({len(members)}, `MKB/{stem}-<dsl>-v0`)\n\n{COLUMNS}\n{RULE}\n" + "".join(map(_row, members))
        )
    parts.append(PROOFS + "".join(_proof(known, checks) for known, checks in problems))
    return "\n".join(parts)


def _row(known: Facts) -> str:
    cells = (
        str(known.number),
        f"`{known.slug}`",
        known.model,
        known.dtype,
        known.shape,
        magnitude(known.bytes, "B"),
        magnitude(known.flops, "FLOP") if known.flops > 1 else "none",
        f"{known.intensity:.1f}",
        f"{known.roofline_us:.1f} ({'memory' if known.memory_bound else known.unit})",
        ", ".join(known.kernels) or "none",
    )
    return _line(cells)


def _proof(known: Facts, checks: ModuleType) -> str:
    faults, others = ("; ".join(names) for names in (checks.WRONG, checks.SECOND))
    return (
        f"\n### {known.number}. `{known.slug}`\n\n"
        f"- Truth compared with: {checks.INDEPENDENT}.\n- Must fail: {faults}.\n- Must pass: {others}.\n"
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
