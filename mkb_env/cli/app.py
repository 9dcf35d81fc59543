"""The commands. What several of them share stands first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mkb_env.judge.client import Judge
    from mkb_env.judge.verdict import Verdict

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Judge GPU kernels written in CuTe DSL and TIRx, on a GPU or in a simulator.",
)

ProblemOption = Annotated[str, typer.Option("--problem", "-p", help="Slug of the problem; `mkb list` shows all.")]
DslOption = Annotated[str, typer.Option("--dsl", "-d", help="cute or tirx.")]
WorkloadOption = Annotated[
    str | None,
    typer.Option("--workload", "-w", help="small, full or heldout. Default: small in the simulator, full on a GPU."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, simulator, cuda or cuda:N.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
SourceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The submission; - reads stdin.")]


def main() -> None:
    """Run the command line."""
    app()


@contextmanager
def misuse() -> Iterator[None]:
    """Turn the ValueErrors by which names and options are refused into usage errors (exit code 2)."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_source(path: Path) -> str:
    """A submission's text; bytes that are no UTF-8 become lone surrogates, which the rules refuse by name."""
    if str(path) == "-":
        data = sys.stdin.buffer.read()
    elif path.is_file():
        data = path.read_bytes()
    else:
        raise typer.BadParameter(f"FILE must be a file or -, got {str(path)!r}")
    return data.decode("utf-8", errors="surrogateescape")


def print_json(value: Any) -> None:
    """One object on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def progress(quiet: bool) -> Callable[[str], None] | None:
    """Stages on stderr, if a person is looking."""
    if quiet or not sys.stderr.isatty():
        return None
    return lambda stage: print(f"  {stage} ...", file=sys.stderr)


def report(verdict: Verdict, as_json: bool) -> None:
    """Print a verdict and end the process: 0 if it passed, else 1."""
    if as_json:
        sys.stdout.write(verdict.to_json() + "\n")
    else:
        from mkb_env.feedback import render

        where = verdict.device or ("simulator" if verdict.simulated else "GPU")
        print(f"{verdict.problem}, {verdict.dsl}, {verdict.workload}, {where}")
        print(render(verdict))
        print("seconds: " + ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in verdict.seconds.items()))
    raise typer.Exit(0 if verdict.passed else 1)


def open_judge(device: str) -> Judge:
    """A judge on ``device``."""
    from mkb_env.judge.client import Judge

    with misuse():
        return Judge(device)


@app.command("list")
def list_problems(json: JsonOption = False) -> None:
    """List the problems."""
    from mkb_env.problems import DSLS, catalog
    from mkb_env.task import brief

    problems = []
    for slug, ref in catalog().items():
        briefing = brief(slug)
        problems.append(
            {
                "slug": slug,
                "number": briefing.number,
                "family": ref.family,
                "title": briefing.title,
                "model": briefing.model,
                "kernels": [dsl for dsl in DSLS if ref.baseline(dsl)],
            }
        )
    if json:
        print_json({"problems": problems})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1))
    table.add_column("problem", no_wrap=True)  # a slug is there to be copied
    for column in ("no.", "family", "title", "model"):
        table.add_column(column, overflow="fold")
    for problem in problems:
        table.add_row(*(str(problem[key]) for key in ("slug", "number", "family", "title", "model")))
    Console().print(table)


@app.command()
def show(
    slug: Annotated[str, typer.Argument(help="Slug of the problem.")],
    dsl: Annotated[str | None, typer.Option("--dsl", "-d", help="Show this DSL's contract as well.")] = None,
    json: JsonOption = False,
) -> None:
    """Show the task that an agent gets."""
    from mkb_env.dsl import NAMES, get
    from mkb_env.registration import problem_id
    from mkb_env.task import brief

    with misuse():
        briefing = brief(slug)
        contract = get(dsl).CONTRACT if dsl else None
    if not json:
        print(briefing.task + (f"\n{contract}" if contract else ""))
        return
    print_json(
        {
            "slug": slug,
            "number": briefing.number,
            "family": briefing.ref.family,
            "title": briefing.title,
            "model": briefing.model,
            "inputs": briefing.inputs,
            "outputs": briefing.outputs,
            "ids": [problem_id(slug, name) for name in NAMES],
            "task": briefing.task,
            "contract": contract,
        }
    )


@app.command()
def judge(
    file: SourceArgument,
    problem: ProblemOption,
    dsl: DslOption,
    workload: WorkloadOption = None,
    device: DeviceOption = "auto",
    timing: Annotated[bool, typer.Option(help="Time the kernel, or only check it.")] = True,
    json: JsonOption = False,
) -> None:
    """Judge a submission: exit code 0 if it passed, 1 if not."""
    court = open_judge(device)
    with misuse():
        verdict = court.judge(
            read_source(file), problem, dsl, workload, timing=timing, on_progress=progress(quiet=json)
        )
    report(verdict, json)


@app.command()
def record(
    file: SourceArgument,
    problem: ProblemOption,
    dsl: DslOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.", dir_okay=False)],
    workload: WorkloadOption = None,
    shape: Annotated[int, typer.Option(help="Which shape of the workload (heldout has several).")] = 0,
    json: JsonOption = False,
) -> None:
    """Record a submission's launches into a plan; needs no GPU."""
    from mkb_env.judge.client import RecordingError
    from mkb_env.plan import encode
    from mkb_env.servers.client import ServerError

    court = open_judge("auto")
    try:
        with misuse():
            workload = workload or court.default_workload
            plan = court.record(read_source(file), problem, dsl, workload, shape=shape)
    except RecordingError as error:
        failure = error.failure
        if json:
            print_json({"plan": None, "failure": failure})
        else:
            print(f"{failure.kind}: {failure.message}" + (f"\nhint: {failure.hint}" if failure.hint else ""))
        raise typer.Exit(1) from None
    except ServerError as error:
        if json:
            print_json({"plan": None, "failure": {"kind": "infra_error", "message": str(error)}})
        else:
            print(f"infra_error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    data = encode(plan)
    output.write_bytes(data)
    launches = [{"kernel": launch.kernel, "grid": launch.grid, "block": launch.block} for launch in plan.launches]
    if json:
        print_json(
            {
                "plan": str(output),
                "bytes": len(data),
                "sha256": plan.digest(),
                "problem": problem,
                "dsl": dsl,
                "workload": workload,
                "shape": shape,
                "launches": launches,
                "failure": None,
            }
        )
        return
    print(f"{output}: {len(data)} bytes, {len(launches)} launches, made for {plan.target}")
    again = f"mkb replay {output} --problem {problem} --workload {workload}"
    print(f"judge it with: {again}{f' --shape {shape}' if shape else ''}")


@app.command()
def replay(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file of `mkb record`.", exists=True, dir_okay=False)],
    problem: ProblemOption,
    workload: WorkloadOption = None,
    shape: Annotated[int, typer.Option(help="Which shape of the workload (heldout has several).")] = 0,
    device: DeviceOption = "auto",
    timing: Annotated[bool, typer.Option(help="Time the kernel, or only check it.")] = True,
    json: JsonOption = False,
) -> None:
    """Judge a recorded plan; needs torch, but neither DSL."""
    from mkb_env.plan import decode

    court = open_judge(device)
    with misuse():
        verdict = court.replay(
            decode(plan.read_bytes()), problem, workload, shape=shape, timing=timing, on_progress=progress(quiet=json)
        )
    report(verdict, json)


@app.command()
def doctor(device: DeviceOption = "auto", json: JsonOption = False) -> None:
    """Say what this machine can do and what is missing; judge one known-good kernel per DSL."""
    from mkb_env.cli.doctor import examine, show_checks

    court = open_judge(device)
    checks = examine(court)
    healthy = all(check.ok or not check.required for check in checks)
    if json:
        print_json({"healthy": healthy, "checks": checks})
    else:
        show_checks(checks, healthy)
    raise typer.Exit(0 if healthy else 1)


@app.command()
def stop(json: JsonOption = False) -> None:
    """End the background servers that keep judging warm (they also end by themselves when idle)."""
    from mkb_env.servers.client import stop_all

    stopped = stop_all()
    if json:
        print_json({"stopped": stopped})
    else:
        print(f"{stopped} servers stopped")
