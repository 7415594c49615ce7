"""`decentlam train` and `decentlam recipes`: options to a recipe, a run, what to say at its end."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console

from decentlam.lab.names import (
    ALGORITHMS,
    BATCH_NORMS,
    DATASETS,
    DETECTION_DATASETS,
    DETECTORS,
    MODELS,
    PRECISIONS,
    RECIPES,
    SCHEDULES,
    STABLE,
    TOPOLOGIES,
)
from decentlam.lab.terminal import console, one_of, print_json, print_table
from decentlam.launch import find_place

if TYPE_CHECKING:  # what takes seconds to import is imported where it is used
    from decentlam.lab.recipes import Recipe
    from decentlam.lab.train import Stop
    from decentlam.lab.train.here import Summary

DEFAULT_RECIPE = "digits"
EXIT_CODES = {"finished": 0, "diverged": 1, "interrupted": 130}


def _option(*names: str, about: str, choices: Sequence[str] = (), listed: bool = True) -> Any:
    """An option of the recipe: left out, the recipe's own value counts."""
    among = f" One of {', '.join(choices)}." if choices and listed else ""
    callback = one_of(choices) if choices else None
    return typer.Option(*names, help=about + among, show_default=False, callback=callback)


Float: TypeAlias = float | None
Int: TypeAlias = int | None
Text: TypeAlias = str | None


def train(
    recipe: Annotated[Text, _option(about="Start from this recipe.", choices=RECIPES)] = None,
    method: Annotated[Text, _option(about="What nodes do.", choices=ALGORITHMS)] = None,
    topology: Annotated[
        Text, _option(about="One of `decentlam topologies`.", choices=TOPOLOGIES, listed=False)
    ] = None,
    nodes: Annotated[Int, _option("-n", "--nodes", about="Number of nodes.")] = None,
    model: Annotated[Text, _option(about="What is trained.", choices=(*MODELS, *DETECTORS))] = None,
    data: Annotated[
        Text, _option(about="On what.", choices=(*DATASETS, *DETECTION_DATASETS))
    ] = None,
    data_path: Annotated[Text, _option(about="Where the data is.")] = None,
    shards: Annotated[
        Text, _option(about="How data is dealt: iid, label-sorted:K or dirichlet:ALPHA.")
    ] = None,
    batch: Annotated[Int, _option(about="Samples per step, of all nodes together.")] = None,
    micro_batch: Annotated[
        Int, _option(about="Samples that a node takes at a time; gradients are added up.")
    ] = None,
    epochs: Annotated[Float, _option(about="Passes over the training set.")] = None,
    lr: Annotated[Float, _option(about="Learning rate for the whole batch.")] = None,
    momentum: Annotated[Float, _option(about="beta of the method.")] = None,
    weight_decay: Annotated[Float, _option(about="Added to the gradient, times x.")] = None,
    nesterov: Annotated[
        bool | None, _option("--nesterov/--no-nesterov", about="Nesterov's momentum.")
    ] = None,
    stable: Annotated[
        Text, _option(about="Where momentum on changing weights diverges.", choices=STABLE)
    ] = None,
    hyper: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of the method, such as mu=0.5; repeatable."),
    ] = None,
    schedule: Annotated[Text, _option(about="Of the rate.", choices=SCHEDULES)] = None,
    warmup_epochs: Annotated[Float, _option(about="Length of the warm-up.")] = None,
    warmup_from: Annotated[Float, _option(about="Its start, as a share of lr.")] = None,
    seed: Annotated[Int, _option(about="Equal seeds give equal runs.")] = None,
    precision: Annotated[Text, _option(about="Of numbers.", choices=PRECISIONS)] = None,
    batch_norm: Annotated[
        Text, _option(about="Statistics of the averaged model.", choices=BATCH_NORMS)
    ] = None,
    evaluate_every: Annotated[
        Float, _option(about="Epochs between evaluations, and checkpoints.")
    ] = None,
    log_every: Annotated[Int, _option(about="Steps per record.")] = None,
    image_size: Annotated[
        Int, _option(about="Detection: pixels of the shorter side of images.")
    ] = None,
    weights: Annotated[
        Text, _option(about="Detection: a file that torchvision published, to start from.")
    ] = None,
    skip_bad_boxes: Annotated[
        bool | None,
        _option(
            "--skip-bad-boxes/--no-skip-bad-boxes",
            about="Detection: leave out boxes that cannot be, and say how many.",
        ),
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
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default out/train/RECIPE-CHANGES.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the directory.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes per node that load data; 0: none.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train a model on nodes that average with their neighbors.

    Every node is a process: those that torchrun, mpirun or srun started, else new ones on this
    machine; with --simulate all nodes are in this process. Options change the recipe. Ctrl-C stops
    after a step and keeps a checkpoint; a second one stops at once.
    """
    changes = changes_of(locals())
    processes = changes.pop("nodes", None) if elastic and resume else None  # may be others now
    from decentlam.lab.train import Stop
    from decentlam.lab.train import train as run
    from decentlam.launch.group import init

    place = None if simulate else find_place()
    if place is not None:
        init()
        changes.setdefault("nodes", place.num_processes)
    first = place is None or place.rank == 0
    chosen, directory, simulate = _of_process_0(
        lambda: _plan(recipe, changes, out, resume, simulate, launched=place is not None)
    )
    again = f"decentlam train {'--elastic ' if elastic else ''}--resume --out {directory}"
    stop = Stop(launched=place is not None, notify=_announce if first and not quiet else None)
    with stop.listening():
        if elastic:
            if simulate or place is not None:
                raise ValueError(
                    "--elastic starts processes of its own; leave out --simulate, and torchrun"
                )
            summary = _elastic(chosen, directory, resume, processes, quiet, stop)
        else:
            summary = run(
                chosen, directory, simulate, resume, workers=workers, quiet=quiet, stop=stop
            )
    if first:
        _report(summary, chosen, again, as_json, quiet)
    raise typer.Exit(EXIT_CODES[summary.status])


def _elastic(
    recipe: Recipe, directory: Path, resume: bool, processes: int | None, quiet: bool, stop: Stop
) -> Summary:
    from decentlam.lab.train.elastic import train_elastic

    def note(text: str) -> None:
        if not quiet:
            typer.echo(f"decentlam: {text}", err=True)

    return train_elastic(
        recipe,
        directory,
        resume=resume,
        processes=processes,
        quiet=quiet,
        note=note,
        stopped=lambda: stop.requested,
    )


def changes_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of `train` change in a recipe."""
    from decentlam.lab.recipes import Recipe

    names = [field.name for field in dataclasses.fields(Recipe)]
    changes = {name: options[name] for name in names if options[name] is not None}
    if "hyper" in changes:
        changes["hyper"] = tuple(_pair(text) for text in changes["hyper"])
    return changes


def recipes(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """List the recipes of `decentlam train`."""
    from decentlam.lab.recipes import RECIPES as MAKERS

    if as_json:
        return print_json({name: maker().as_json() for name, maker in MAKERS.items()})
    keys = ("data", "model", "nodes", "topology", "batch", "lr", "epochs", "schedule", "shards")
    rows = []
    for name, maker in MAKERS.items():
        values = maker().as_json()
        rows.append({"recipe": name, **{key: values[key] for key in keys}})
    print_table(rows)
    about = {name: (inspect.getdoc(maker) or "").split("\n")[0] for name, maker in MAKERS.items()}
    console().print("\n" + "\n".join(f"{name:<22}{text}" for name, text in about.items()))


def _plan(
    name: str | None,
    changes: dict[str, Any],
    out: Path | None,
    resume: bool,
    simulate: bool,
    launched: bool,
) -> tuple[Recipe, Path, bool]:
    """The recipe, where it is run, and whether it is simulated."""
    from decentlam.lab.recipes import make
    from decentlam.lab.train.records import read_recipe

    if not resume:
        recipe = make(name or DEFAULT_RECIPE, **changes)
        return recipe, out or _free(_default(name, changes)), simulate
    directory = out or _latest(_default(name, changes))
    before, simulated = read_recipe(directory)
    recipe = make(name, **changes) if name else dataclasses.replace(before, **changes)
    return recipe, directory, simulate or (simulated and not launched)


def _default(name: str | None, changes: dict[str, Any]) -> Path:
    """out/train/digits-dmsgd-lr0.1: the recipe and what was changed in it."""
    words = [name or DEFAULT_RECIPE]
    for field, value in changes.items():
        telling = isinstance(value, str)
        words.append(str(value) if telling else f"{field.replace('_', '-')}{value}")
    return Path("out") / "train" / re.sub(r"[^\w.:=-]+", "_", "-".join(words))[:100]


def _free(path: Path) -> Path:
    return next(p for p in _numbered(path) if not _holds_a_run(p))


def _latest(path: Path) -> Path:
    """The last of the runs that were started with the same options."""
    latest = path
    for candidate in _numbered(path):
        if not _holds_a_run(candidate):
            break
        latest = candidate
    return latest


def _holds_a_run(path: Path) -> bool:
    from decentlam.lab.train.records import RUN

    return (path / RUN).exists()


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in range(2, 10_000):
        yield path.with_name(f"{path.name}-{number}")


def _of_process_0(plan: Callable[[], tuple[Recipe, Path, bool]]) -> tuple[Recipe, Path, bool]:
    """The plan of process 0, on every process; its error is raised on every one."""
    from decentlam.checkpoint.together import together
    from decentlam.exchange.network import connect
    from decentlam.lab.recipes import from_json

    def work() -> tuple[Any, str, bool] | None:
        if network.rank != 0:
            return None
        recipe, directory, simulate = plan()
        return recipe.as_json(), str(directory), simulate

    network = connect()
    recipe, directory, simulate = network.gather(together(network, work))[0]
    return from_json(recipe), Path(directory), simulate


def _pair(text: str) -> tuple[str, Any]:
    """mu=0.5 as a name and a value: a number, true, false, or text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--hyper takes NAME=VALUE, such as mu=0.5, got {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _announce() -> None:
    typer.echo("decentlam: stopping after this step; Ctrl-C again to stop at once", err=True)


def _report(summary: Summary, recipe: Recipe, again: str, as_json: bool, quiet: bool) -> None:
    Console(stderr=True).show_cursor()  # a process that was stopped may have left it hidden
    if summary.status == "diverged":
        typer.echo(f"decentlam: diverged: {' '.join(summary.message.split())}", err=True)
    if as_json:
        found = dataclasses.asdict(summary)
        return print_json(found | {"resume": again if summary.status == "interrupted" else None})
    if not quiet:
        from decentlam.lab.train.records import SCORES

        last = summary.evaluation or {}
        keys = SCORES[recipe.task]
        row = {"method": recipe.method, "status": summary.status, "steps": summary.step}
        print_table([row | {key: last.get(key) for key in keys} | {"seconds": summary.seconds}])
        console().print(f"\nWrote {summary.directory}")
    if summary.status == "interrupted":
        typer.echo(f"decentlam: interrupted at step {summary.step}; to go on: {again}", err=True)
