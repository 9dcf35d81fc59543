#!/usr/bin/env python3
"""The catalog as a page, and every problem measured and held against its contract at full size.

    python scripts/problems.py page                        # rewrites docs/problems.md
    python scripts/problems.py measure --device cuda       # one JSON object per problem; exit 1 if one does not qualify

``measure`` needs torch and a GPU, but neither DSL. Of each problem it reports, at ``full``: microseconds of the eager
reference (median, L2 cold), of drawing the inputs, and of the fp64 anchor; GiB allocated at the most while inputs
are drawn and the reference runs; and what every check of ``mkb check-problem`` says, the judge's verdict on each
variant included, timed draws too for the right ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mkb_env.devices.function import FunctionDevice, outline  # noqa: E402
from mkb_env.judge import draws, qualify, timing  # noqa: E402
from mkb_env.judge.evaluate import EvaluateOptions, evaluate  # noqa: E402
from mkb_env.judge.facts import facts  # noqa: E402
from mkb_env.judge.page import page  # noqa: E402
from mkb_env.judge.verdict import Stage  # noqa: E402
from mkb_env.problems import Problem, catalog, load, load_checks  # noqa: E402
from mkb_env.problems.contract import Shape  # noqa: E402

PAGE = ROOT / "docs" / "problems.md"
EAGER_US, DRAW_US, GIB = 25_000, 20_000, 8.0
"""What no problem may exceed at full size on an H200."""


def repeat(work: Callable[[], Any], clock: timing.Stopwatch, count: int = 5) -> float:
    """Median microseconds of ``work``, after one run that is not counted."""
    work()
    return statistics.median(clock.idle(work)[0] for _ in range(count))


def figures(problem: Problem, shape: Shape, device: torch.device) -> dict[str, float]:
    """Times and memory of one problem."""
    clock = timing.Stopwatch(FunctionDevice(problem.reference, device))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    inputs = draws.draw(problem, shape, 1, device, shift=False)
    drawing = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    with draws.strict_math(), torch.no_grad():
        outputs = draws.leaves(problem.reference(*inputs))
        running = torch.cuda.max_memory_allocated(device) - before
        eager = repeat(lambda: problem.reference(*inputs), clock)
    begin = time.perf_counter()
    draws.anchors(problem, inputs, outputs)
    torch.cuda.synchronize(device)
    anchor = time.perf_counter() - begin
    del outputs
    generator = torch.Generator(device)
    draw = repeat(lambda: problem.make_inputs(generator.manual_seed(2), shape), clock)
    return {
        "eager_us": round(eager, 1),
        "draw_us": round(draw, 1),
        "anchor_us": round(anchor * 1e6, 1),
        "gib": round(running / 2**30, 3),
        "drawing_gib": round(drawing / 2**30, 3),
    }


def complaints(problem: Problem, shape: Shape, device: torch.device, held_out: bool) -> list[str]:
    """What does not hold of one problem at one shape. Planted faults need not show in held-out shapes."""
    checks = load_checks(problem.slug)
    found = []
    timed: list[Callable[[], object]] = [
        lambda: qualify.check_variants(problem, checks, shape, device),
        lambda: check_timed(problem, checks.SECOND, shape, device),
    ]
    for check in (
        lambda: qualify.check_draws(problem, shape, device),
        lambda: qualify.check_reference(problem, shape, device),
        lambda: qualify.check_independent(problem, checks, shape, device),
        *(timed[1:] if held_out else timed),
    ):
        try:
            check()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:1500])
        torch.cuda.empty_cache()
    return found


def check_timed(problem: Problem, right: dict[str, Callable[..., Any]], shape: Shape, device: torch.device) -> None:
    """Right variants pass with timing too: the quick rule of timed draws turns none away."""
    options = EvaluateOptions(correctness_draws=2, min_draws=10, max_draws=10, warmup=1, timing_seconds=5.0)
    for name, function in right.items():
        found = evaluate(problem, shape, outline(problem, shape), FunctionDevice(function, device), options)
        qualify.require(found.stage is Stage.PASSED, f"{name!r}, timed: {found.stage.value}: {found.message}")


def measure(slugs: list[str], device: torch.device, workload: str) -> bool:
    """Print one line per problem and shape; whether all qualify."""
    good = True
    for slug in slugs:
        problem = load(slug)
        for index, shape in enumerate(problem.shapes(workload)):
            begin = time.perf_counter()
            row: dict[str, Any] = {"number": problem.number, "slug": slug, "workload": workload, "shape": index}
            try:
                row |= figures(problem, shape, device)
                limits = (("eager_us", EAGER_US), ("draw_us", DRAW_US), ("gib", GIB))
                row["complaints"] = [f"{key} is {row[key]}, over {most}" for key, most in limits if row[key] > most]
                row["complaints"] += complaints(problem, shape, device, workload == "heldout")
            except Exception as error:
                row["complaints"] = [f"{type(error).__name__}: {error}"[:1500]]
            row["seconds"] = round(time.perf_counter() - begin, 2)
            good &= not row["complaints"]
            print(json.dumps(row), flush=True)
            torch.cuda.empty_cache()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("page", help="rewrite docs/problems.md")
    run = commands.add_parser("measure", help="measure and check problems at full size")
    run.add_argument("slugs", nargs="*", help="default: all")
    run.add_argument("--family", help="only this family")
    run.add_argument("--device", default="cuda")
    run.add_argument("--workload", default="full")
    arguments = parser.parse_args()
    if arguments.command == "page":
        PAGE.write_text(page([(facts(load(slug)), load_checks(slug)) for slug in catalog()]), encoding="utf-8")
        return 0
    slugs = arguments.slugs or [s for s, ref in catalog().items() if arguments.family in (None, ref.family)]
    return 0 if measure(slugs, torch.device(arguments.device), arguments.workload) else 1


if __name__ == "__main__":
    sys.exit(main())
