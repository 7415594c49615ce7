"""`decentlam report`: one page about training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decentlam.lab.terminal import Json, console, out_option, print_json


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIRECTORY...", help="Runs of `train`, or studies.")
    ],
    out: Annotated[str | None, out_option("Default DIRECTORY/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page about one or more training runs."""
    from decentlam.lab.report import write

    page = write(directories, Path(out) if out else directories[0] / "report.html")
    if as_json:
        return print_json({"report": str(page)})
    console().print(f"Wrote {page}")
