"""`decentlam watch`: a run while it trains, as a page or in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from decentlam.lab.commands.report import newest, runs


def watch(
    run: Annotated[
        Path | None,
        typer.Argument(help="The directory of `train`, or of `monitor`; default: the newest run."),
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Print a line per node here instead of a page.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="The address that may be asked; 0.0.0.0: any.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8077,
) -> None:
    """See a run while it trains: who talks to whom, who is late, loss, disagreement, bytes."""
    from decentlam.lab.watch import serving, show_in_terminal

    directory = run or newest()
    if not directory.is_dir():
        there = ", ".join(map(str, runs(directory.parent))) or "none"
        raise ValueError(f"there is no run in {directory}; runs beside it: {there}")
    if terminal:
        return show_in_terminal(directory)
    with serving(directory, host, port) as address:
        typer.echo(f"{directory} is shown at {address}; Ctrl-C ends this, not the run")
        while True:
            time.sleep(3600)
