"""`decentlam reproduce`: a study of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decentlam.errors import unknown
from decentlam.lab.names import STUDIES
from decentlam.lab.progress import Progress
from decentlam.lab.terminal import (
    Json,
    Seed,
    out_option,
    print_json,
    print_table,
)


def reproduce(
    study: Annotated[str, typer.Argument(help=f"One of {', '.join(STUDIES)}.")],
    out: Annotated[str | None, out_option("Run directory; default out/STUDY.")] = None,
    seed: Seed = 0,
    nodes: Annotated[int | None, typer.Option("-n", "--nodes", help="Number of nodes.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and points.")] = False,
    data: Annotated[
        str | None, typer.Option(help="Train on this instead of Fashion-MNIST.")
    ] = None,
    data_path: Annotated[
        str | None, typer.Option(help="Where it is; Fashion-MNIST has a usual place.")
    ] = None,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="runtime without emulated links; needs no root.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a study of the paper: a table here, records and plots in the run directory."""
    if study not in STUDIES:
        raise ValueError(unknown("study", study, STUDIES))
    from decentlam.lab import studies
    from decentlam.lab.studies.study import perform

    chosen = studies.STUDIES[study]
    if (data or data_path) and not chosen.resumable:
        raise ValueError(f"{study} reads no data; leave --data and --data-path out")
    if (data or data_path) and quick and study != "detection":
        raise ValueError("--quick makes do with data of its own; leave --data and --data-path out")
    if loopback and study != "runtime":
        raise ValueError(f"--loopback is for runtime; {study} emulates no network, leave it out")
    given = {"nodes": nodes, "data": data, "data_path": data_path, "loopback": loopback or None}
    given = {name: value for name, value in given.items() if value is not None}
    recipe = chosen.recipe(seed=seed, quick=quick, **given)
    progress = Progress(f"decentlam: {study}:")
    result = perform(chosen, recipe, Path(out or f"out/{study}"), progress.update)
    files = [str(path) for path in result.files]
    if as_json:
        return print_json(
            {"study": study, "table": result.table, "notes": result.notes, "files": files}
        )
    typer.echo(f"{study}: {chosen.summary}\n")
    print_table(result.table)
    typer.echo("\n" + "\n".join([*result.notes, "", "Wrote:", *(f"  {f}" for f in files)]))
