"""`decentlam report`: one page about training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decentlam.lab.terminal import Json, out_option, print_json


def report(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIRECTORY...]", help="Runs of `train`, or studies; default: the newest run."
        ),
    ] = None,
    out: Annotated[str | None, out_option("Default DIRECTORY/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page about one or more training runs."""
    from decentlam.lab.report import write

    directories = directories or [newest()]
    if absent := [path for path in directories if not path.exists()]:
        there = ", ".join(map(str, runs(absent[0].parent))) or "none"
        raise ValueError(f"there is no run in {absent[0]}; runs beside it: {there}")
    page = write(directories, Path(out) if out else directories[0] / "report.html")
    if as_json:
        return print_json({"report": str(page)})
    typer.echo(f"Wrote {page}")


def runs(parent: Path) -> list[Path]:
    """Return the runs in a directory, the oldest first."""
    from decentlam.lab.train.records import RUN

    found = [path for path in parent.glob("*") if (path / RUN).is_file()]
    return sorted(found, key=lambda path: (path / RUN).stat().st_mtime)


def newest() -> Path:
    """Return the newest run of `decentlam train`."""
    found = runs(Path("out") / "train")
    if not found:
        raise ValueError("there is no run in out/train; run `decentlam train`, or give a directory")
    return found[-1]
