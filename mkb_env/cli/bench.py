"""``mkb bench judge``: how many verdicts this machine gives."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mkb_env.cli.options import DeviceOption, JsonOption, app, misuse, open_judge, print_json

bench = typer.Typer(no_args_is_help=True, help="Measure this installation.")


def register() -> None:
    """Add the commands to the application."""
    bench.command("judge")(judge)
    app.add_typer(bench, name="bench")


@bench.callback()
def _group() -> None:
    """Measure this installation."""


def judge(
    device: DeviceOption = "auto",
    seconds: Annotated[float, typer.Option(help="How long to measure, in all.", min=1)] = 60.0,
    problem: Annotated[list[str] | None, typer.Option("--problem", "-p", help="Slugs; default: two norms.")] = None,
    dsl: Annotated[list[str] | None, typer.Option("--dsl", "-d", help="Default: both.")] = None,
    recorders: Annotated[int | None, typer.Option(help="Recordings at a time; default: one per CPU.", min=1)] = None,
    json: JsonOption = False,
) -> None:
    """Latency and throughput of full verdicts on fresh sources."""
    from mkb_env.dsl import NAMES, get
    from mkb_env.judge.bench import PROBLEMS, run
    from mkb_env.problems import find

    open_judge(device)
    with misuse():
        slugs = [find(slug.replace("-", "_")).slug for slug in problem or PROBLEMS]
        names = [get(name).NAME for name in dsl or NAMES]
        report = run(
            device,
            seconds,
            slugs,
            names,
            recorders,
            lambda text: None if json else print(text, file=sys.stderr),
        )
    if json:
        print_json(report)
        return
    how = "simulated" if report.simulated else "measured"
    print(f"{report.device} ({how} times), {report.recorders} recorders: {report.verdicts_per_minute:.0f} verdicts/min")
    print("dsl   verdicts/min  p50 s  p95 s  busy  not passed  problem")
    for row in report.rows:
        busy = "   -" if row.device_utilisation is None else f"{row.device_utilisation:4.0%}"
        print(
            f"{row.dsl:5} {row.verdicts_per_minute:12.1f} {row.latency_p50:6.2f} {row.latency_p95:6.2f}  {busy} "
            f"{row.not_passed:11}  {row.problem} {row.workload}"
        )
        if row.spread:
            print(
                f"      against itself, {row.spread.comparisons} times, {row.spread.kernel_us:.1f} us: half-width "
                f"{row.spread.half_width:.2%}, {row.spread.covered:.0%} of the intervals hold 1"
            )
