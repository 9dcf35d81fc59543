"""The commands about problems: ``list``, ``show``, ``new-problem``, ``check-problem``."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mkb_env.cli.options import JsonOption, app, misuse, print_json, spelled

if TYPE_CHECKING:
    from mkb_env.judge.jobs import Facts

SKELETON = Path(__file__).parent / "skeleton"
SLUG = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")


def register() -> None:
    """Add the commands to the application, in the order of its help."""
    app.command("list")(list_problems)
    app.command("show")(show)
    app.command("new-problem")(new_problem)
    app.command("check-problem")(check_problem)


def figures(slugs: Sequence[str]) -> list[Facts]:
    """What is known of these problems; asked of a server, as it takes torch."""
    from mkb_env.judge.client import Judge

    return Judge("simulator").facts(slugs)


def entry(known: Facts) -> dict[str, Any]:
    """A problem as ``--json`` prints it."""
    import msgspec

    from mkb_env.dsl import NAMES
    from mkb_env.registration import family_id, problem_id

    return {
        **msgspec.structs.asdict(known),
        "intensity": known.intensity,
        "ids": [problem_id(known.slug, dsl) for dsl in NAMES],
        "family_ids": [family_id(known.family, dsl) for dsl in NAMES],
    }


def list_problems(
    family: Annotated[str | None, typer.Option("--family", "-f", help="Only this family.")] = None,
    json: JsonOption = False,
) -> None:
    """List the problems: what they are, where they come from and the least time they take on an H200."""
    from mkb_env.dsl import NAMES
    from mkb_env.judge.page import magnitude
    from mkb_env.problems import FAMILIES, catalog
    from mkb_env.registration import family_id, problem_id

    if family not in (None, *FAMILIES):
        raise typer.BadParameter(f"--family must be one of {', '.join(FAMILIES)}, got {family!r}")
    slugs = [slug for slug, ref in catalog().items() if family in (None, ref.family)]
    problems = sorted(figures(slugs), key=lambda known: known.number)
    if json:
        print_json({"problems": [entry(known) for known in problems]})
        return
    for name in FAMILIES if family is None else [family]:
        print(f"{name}: {family_id(name, 'DSL')} draws one of")
        for known in (p for p in problems if p.family == name):
            print(f"  {known.slug}")
            kernels = f"; kernels here: {', '.join(known.kernels)}" if known.kernels else ""
            work = f"{magnitude(known.flops, 'FLOP')}, {known.intensity:.1f} FLOP/B, " if known.flops > 1 else ""
            text = (
                f"{known.title} (no. {known.number}, {known.model}); {magnitude(known.bytes, 'B')}, {work}"
                f"at least {known.roofline_us:.1f} us "
                f"on an H200 ({'memory' if known.memory_bound else known.unit}){kernels}"
            )
            print(textwrap.fill(text, 79, initial_indent=" " * 4, subsequent_indent=" " * 4))
            print(f"    {problem_id(known.slug, 'DSL')}")
    print(f"{len(problems)} problems. DSL is {' or '.join(NAMES)}. `mkb show SLUG` shows the task.")


def show(
    slug: Annotated[str, typer.Argument(help="Slug of the problem.", callback=spelled)],
    dsl: Annotated[str | None, typer.Option("--dsl", "-d", help="Show this DSL's contract as well.")] = None,
    json: JsonOption = False,
) -> None:
    """Show the task that an agent gets."""
    from mkb_env.dsl import get
    from mkb_env.task import brief

    with misuse():
        briefing = brief(slug)
        contract = get(dsl).CONTRACT if dsl else None
    if not json:
        print(briefing.task + (f"\n{contract}" if contract else ""))
        return
    [known] = figures([slug])
    print_json({**entry(known), "task": briefing.task, "contract": contract})


def new_problem(
    slug: Annotated[str, typer.Argument(help="Name of the new folder: words in lower case joined by _.")],
    family: Annotated[str, typer.Option("--family", "-f", help="Which family it joins.")],
) -> None:
    """Make the folder of a new problem; `mkb check-problem` says what is left to fill in."""
    from mkb_env.problems import FAMILIES, catalog
    from mkb_env.problems.contract import ROOT
    from mkb_env.task import brief

    slug = slug.replace("-", "_")
    if family not in FAMILIES:
        raise typer.BadParameter(f"--family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if not SLUG.fullmatch(slug):
        raise typer.BadParameter(
            f"SLUG must be words in lower case joined by _, such as rmsnorm_h128_bf16; got {slug!r}"
        )
    folder = ROOT / family / slug
    if slug in catalog() or folder.exists():
        raise typer.BadParameter(f"there is a problem called {slug!r} already; choose another slug")
    number = 1 + max(brief(other).number for other in catalog())
    try:
        folder.mkdir(parents=True)
        for name in ("problem", "checks"):
            text = (SKELETON / f"{name}.txt").read_text(encoding="utf-8")
            (folder / f"{name}.py").write_text(text.replace("{number}", str(number)), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error.strerror}") from None
    print(f"{folder}: fill in problem.py and checks.py, then run `mkb check-problem {slug}`")


def check_problem(
    slug: Annotated[str, typer.Argument(help="Slug of the problem.", callback=spelled)],
    device: Annotated[str, typer.Option(help="cpu or cuda: where the reference and its variants run.")] = "cpu",
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", help="full, small or heldout. Default: all that a CPU does quickly."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Hold a problem against the contract: exit code 0 if it qualifies, 1 if not. Runs its files in this process."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if device.startswith("cuda"):
        with misuse():
            from mkb_env.devices.cuda import require

            require(device)
    with misuse():
        from mkb_env.judge.qualify import examine

        findings = []
        for finding in examine(slug, device, workload):
            findings.append(finding)
            if not json:
                print(
                    f"{'ok  ' if finding.passed else 'FAIL'} {finding.check}"
                    + (f": {finding.message}" if finding.message else "")
                )
                sys.stdout.flush()
    passed = all(finding.passed for finding in findings)
    if json:
        print_json({"slug": slug, "passed": passed, "findings": findings})
    raise typer.Exit(0 if passed else 1)
