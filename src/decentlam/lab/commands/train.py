"""`decentlam train`: options to a recipe, a run, its report, and what to say at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decentlam.lab import recipes
from decentlam.lab.commands.report import newest
from decentlam.lab.recipes import RECIPES, Recipe
from decentlam.lab.terminal import (
    Json,
    out_option,
    print_json,
    print_table,
    with_fields,
)
from decentlam.launch import launched_process

if TYPE_CHECKING:  # what takes seconds to import is imported where it is used
    from decentlam.lab.train import Summary

log = logging.getLogger(__name__)

Plan = tuple[Recipe, Path, bool]  # what is run, where, and whether its nodes were simulated

EXIT_CODES = {"finished": 0, "diverged": 1, "interrupted": 130}


@with_fields(Recipe)
def train(
    recipe: Annotated[
        str | None, typer.Option(help=f"Start from this recipe. One of {', '.join(RECIPES)}.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="All nodes in this process.")
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Go on when processes die, and start them again; see docs/survive.md."
        ),
    ] = False,
    out: Annotated[str | None, out_option("Run directory; default out/train/RECIPE.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or the newest.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run at a local address while it trains.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes per node that load data; 0: none.")
    ] = 0,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    **changes: Any,
) -> None:
    """Train a model on nodes that average with their neighbors.

    Every node is a process: those that torchrun, mpirun or srun started, else new ones on this
    machine; with --simulate all nodes are in this process. Options change the recipe. Ctrl-C stops
    with the next step record and keeps a checkpoint; a second one stops at once. The run ends with
    a page, report.html in its directory.
    """
    place = None if simulate else launched_process()
    first = place is None or place.rank == 0
    from decentlam.checkpoint.all_processes import on_process_0
    from decentlam.lab.train import Stop
    from decentlam.lab.train import train as run
    from decentlam.launch.init import init
    from decentlam.network.network import connect

    if "hyper" in changes:
        changes["hyper"] = tuple(_pair(text) for text in changes["hyper"])
    # An elastic run may go on with another number of processes.
    processes = changes.pop("nodes", None) if elastic and resume else None
    if place is not None:
        init()
        changes.setdefault("nodes", place.num_processes)
    # Process 0 plans; its error is raised on every process.
    network = connect()
    plan = _resumed if resume else _planned
    planned = on_process_0(network, lambda: plan(recipe, changes, out))
    chosen, directory, simulated = network.gather(planned)[0]
    if simulated and place is None:
        simulate = True

    def say(text: str) -> None:
        if first and not quiet:
            typer.echo(f"decentlam: {text}", err=True)

    announcement = "stopping with the next step record; Ctrl-C again to stop at once"
    stop = Stop(launched=place is not None, notify=lambda: say(announcement))
    with stop.listening(), contextlib.ExitStack() as shown:
        if watch and first:
            from decentlam.lab.watch import serving

            say(f"shown at {shown.enter_context(serving(directory))} while it trains")
        summary = run(
            chosen,
            directory,
            simulate,
            resume,
            elastic=elastic,
            processes=processes,
            workers=workers,
            quiet=quiet,
            stop=stop,
            note=say,
        )
    if first:
        report = _write_report(directory)
        again = f"decentlam train {'--elastic ' * elastic}--resume --out {directory}"
        interrupted = summary.status == "interrupted"
        if summary.status == "diverged":
            typer.echo(f"decentlam: diverged: {' '.join(summary.message.split())}", err=True)
        if as_json:
            more = {"resume": again if interrupted else None, "report": report and str(report)}
            print_json(dataclasses.asdict(summary) | more)
        else:
            if not quiet:
                _show(summary, chosen, report or directory)
            if interrupted:
                at = f"interrupted at step {summary.step}"
                typer.echo(f"decentlam: {at}; to go on: {again}", err=True)
    raise typer.Exit(EXIT_CODES[summary.status])


def _write_report(directory: Path) -> Path | None:
    """Write the run's page; training has ended well even if that fails."""
    from decentlam.lab.report import write

    try:
        return write([directory], directory / "report.html")
    except Exception as error:
        log.warning("the run is complete, but not its report: %s: %s", type(error).__name__, error)
        return None


def _show(summary: Summary, recipe: Recipe, written: Path) -> None:
    from decentlam.lab.train.records import SCORES

    last = summary.evaluation or {}
    row = {"method": recipe.method, "status": summary.status, "steps": summary.step}
    row |= {key: last.get(key) for key in SCORES[recipe.task]}
    print_table([row | {"seconds": summary.seconds}])
    typer.echo(f"\nWrote {written}")


def _planned(name: str | None, changes: dict[str, Any], out: str | None) -> Plan:
    """Return a new run in a free directory: out/train/digits, out/train/digits-2 and so on."""
    from decentlam.lab.train.records import RUN

    name = name or next(iter(RECIPES))
    recipe, path = recipes.make(name, **changes), Path("out") / "train" / name
    others = (path.with_name(f"{name}-{number}") for number in itertools.count(2))
    free = next(free for free in itertools.chain([path], others) if not (free / RUN).exists())
    return recipe, Path(out) if out else free, False


def _resumed(name: str | None, changes: dict[str, Any], out: str | None) -> Plan:
    """Return the run that is in the directory, and whether its nodes were simulated."""
    from decentlam.lab.train.records import read_recipe

    directory = Path(out) if out else newest()
    before, info = read_recipe(directory)
    recipe = recipes.make(name, **changes) if name else dataclasses.replace(before, **changes)
    return recipe, directory, bool(info.get("simulated"))


def _pair(text: str) -> tuple[str, Any]:
    """Split mu=0.5 into a name and a value: a number, true, false, or text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--hyper takes NAME=VALUE, such as mu=0.5, got {text!r}")
    try:
        return name, json.loads(value.lower())
    except ValueError:
        return name, value
