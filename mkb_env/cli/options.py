"""The command line's application, and what several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mkb_env.cli.entry import OneSentence

if TYPE_CHECKING:
    from mkb_env.judge.client import Judge

app = typer.Typer(
    cls=OneSentence,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Judge GPU kernels written in CuTe DSL and TIRx, on a GPU or in a simulator.",
)


def spelled(slug: str | None) -> str | None:
    """A slug as its folder is named, also where the id of an environment was given."""
    if not slug:
        return slug
    known = re.fullmatch(r"(?:mkb_env:)?MKB/(.*?)(?:-(?:cute|tirx)-v\d+)?", slug)
    return (known[1] if known else slug).replace("-", "_")


ProblemOption = Annotated[
    str, typer.Option("--problem", "-p", callback=spelled, help="Slug of the problem; `mkb list` shows all.")
]
DslOption = Annotated[str, typer.Option("--dsl", "-d", help="cute or tirx.")]
WorkloadOption = Annotated[
    str | None,
    typer.Option("--workload", "-w", help="small, full or heldout. Default: small in the simulator, full on a GPU."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, simulator, cuda, cuda:N or ray (a Ray cluster).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
SourceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The submission; - reads stdin.")]


def show_version(wanted: bool) -> None:
    """Print this package's version and end."""
    if wanted:
        from importlib.metadata import version

        print(version("mkb-env"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Judge GPU kernels written in CuTe DSL and TIRx, on a GPU or in a simulator."""


@contextmanager
def misuse() -> Iterator[None]:
    """Turn the ValueErrors by which names and options are refused into usage errors (exit code 2)."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def print_json(value: Any) -> None:
    """One object on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def open_judge(device: str) -> Judge:
    """A judge on ``device``, which must be there."""
    from mkb_env.judge.client import Judge

    with misuse():
        court = Judge(device)
        if device.startswith("cuda"):
            from mkb_env.devices.cuda import require

            require(device)
        if device.startswith("ray"):
            from mkb_env.servers.client import ServerError

            try:
                court.workers  # noqa: B018 - joins the cluster
            except ServerError as error:
                raise typer.BadParameter(str(error)) from None
    return court
