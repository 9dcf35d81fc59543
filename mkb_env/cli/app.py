"""The commands around a submission; those about problems are in :mod:`mkb_env.cli.problems`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mkb_env.cli import bench, problems
from mkb_env.cli.options import (
    DeviceOption,
    DslOption,
    JsonOption,
    ProblemOption,
    SourceArgument,
    WorkloadOption,
    app,
    misuse,
    open_judge,
    print_json,
    spelled,
)
from mkb_env.cli.progress import told

if TYPE_CHECKING:
    from mkb_env.judge.client import Judge
    from mkb_env.judge.verdict import Verdict
    from mkb_env.plan import LaunchPlan

problems.register()
bench.register()


def main() -> None:
    """Run the command line."""
    app()


def read_source(path: Path) -> str:
    """A submission's text; bytes that are no UTF-8 become lone surrogates, which the rules refuse by name."""
    if str(path) == "-":
        data = sys.stdin.buffer.read()
    elif path.is_dir():
        raise typer.BadParameter(f"FILE must be a file or -, got the folder {str(path)!r}")
    elif not path.exists():
        raise typer.BadParameter(f"FILE must be a file or -, there is no {str(path)!r}")
    else:
        data = path.read_bytes()
    return data.decode("utf-8", errors="surrogateescape")


def check_writable(path: Path) -> None:
    """Refuse a place that cannot be written before the work for it is done."""
    folder = path.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"--output {str(path)!r} cannot be written: there is no folder {str(folder)!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"--output {str(path)!r} cannot be written: permission denied")


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


def warn_of_full(court: Judge, workload: str | None) -> None:
    """Say on stderr that the simulator is slow at full size."""
    if workload == "full" and court.simulated:
        print("note: full shapes may take minutes in the simulator; --workload small is quick", file=sys.stderr)


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
    source = read_source(file)
    court = open_judge(device)
    warn_of_full(court, workload)
    with misuse(), told(quiet=json) as on_progress:
        verdict = court.judge(source, problem, dsl, workload, timing=timing, on_progress=on_progress)
    report(verdict, json)


@app.command()
def record(
    file: SourceArgument,
    problem: ProblemOption,
    dsl: DslOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.", dir_okay=False)],
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload", "-w", help="small, full or heldout. Default: full where there is a GPU, else small."
        ),
    ] = None,
    shape: Annotated[int, typer.Option(help="Which shape of the workload (heldout has several).")] = 0,
    json: JsonOption = False,
) -> None:
    """Record a submission's launches into a plan; needs no GPU."""
    from mkb_env.judge.client import RecordingError
    from mkb_env.plan import encode
    from mkb_env.servers.client import ServerError

    check_writable(output)
    source = read_source(file)
    court = open_judge("auto")
    try:
        with misuse():
            workload = workload or court.default_workload
            plan = court.record(source, problem, dsl, workload, shape=shape)
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
    print(f"judge it with: mkb replay {output}")


def recorded_for(
    plan: LaunchPlan, problem: str | None, workload: str | None, shape: int | None
) -> tuple[str, str, int]:
    """What a plan is judged as: what it was recorded for, which options may repeat; an old plan needs the options."""
    if not plan.problem:
        if problem is None or workload is None:
            raise ValueError("this plan does not say what it was recorded for: give --problem and --workload")
        return problem, workload, shape or 0
    given = {"--problem": problem, "--workload": workload, "--shape": shape}
    recorded = {"--problem": plan.problem, "--workload": plan.workload, "--shape": plan.shape}
    for option, value in given.items():
        if value not in (None, recorded[option]):
            made_for = f"{plan.problem}, {plan.workload}, shape {plan.shape}"
            raise ValueError(f"this plan was recorded for {made_for}; got {option} {value}")
    return plan.problem, plan.workload, plan.shape


@app.command()
def replay(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file of `mkb record`.", exists=True, dir_okay=False)],
    problem: Annotated[
        str | None, typer.Option("--problem", "-p", callback=spelled, help="Default: what the plan was recorded for.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", help="Default: what the plan was recorded for.")
    ] = None,
    shape: Annotated[int | None, typer.Option(help="Default: what the plan was recorded for.")] = None,
    device: DeviceOption = "auto",
    timing: Annotated[bool, typer.Option(help="Time the kernel, or only check it.")] = True,
    json: JsonOption = False,
) -> None:
    """Judge a recorded plan, on any device; needs torch, but neither DSL."""
    from mkb_env.plan import decode

    with misuse():
        launches = decode(plan.read_bytes())
        problem, workload, shape = recorded_for(launches, problem, workload, shape)
    court = open_judge(device)
    warn_of_full(court, workload)
    with misuse(), told(quiet=json) as on_progress:
        verdict = court.replay(launches, problem, workload, shape=shape, timing=timing, on_progress=on_progress)
    report(verdict, json)


@app.command()
def doctor(
    device: DeviceOption = "auto",
    measure: Annotated[bool, typer.Option("--measure", help="Measure the GPU's ceilings and keep them.")] = False,
    json: JsonOption = False,
) -> None:
    """Say what this machine can do and what is missing; judge one known-good kernel per DSL."""
    from mkb_env.cli.doctor import examine, show_ceilings, show_checks
    from mkb_env.judge.roofline import keep

    court = open_judge(device)
    with misuse():
        ceilings = court.measure() if measure else None
    kept = keep(ceilings) if ceilings else None
    checks = examine(court)
    healthy = all(check.ok or not check.required for check in checks)
    if json:
        print_json({"healthy": healthy, "checks": checks, "ceilings": ceilings, "kept": kept and str(kept)})
    else:
        show_checks(checks, healthy)
        if ceilings:
            show_ceilings(ceilings, str(kept))
    raise typer.Exit(0 if healthy else 1)


def end_actors() -> None:
    """End the Ray cluster's actors; misuse if there is no cluster."""
    from mkb_env.judge.workers import check_device
    from mkb_env.servers.client import ServerError

    with misuse():
        check_device("ray")
    from mkb_env.devices.ray import stop_actors

    try:
        stop_actors()
    except ServerError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def stop(
    ray: Annotated[bool, typer.Option("--ray", help="End the actors of the Ray cluster too; frees its GPUs.")] = False,
    json: JsonOption = False,
) -> None:
    """End the background servers that keep judging warm (they also end by themselves when idle)."""
    from mkb_env.servers.client import stop_all

    if ray:
        end_actors()
    stopped = stop_all()
    if json:
        print_json({"stopped": stopped})
    else:
        print(f"{stopped} servers stopped")
