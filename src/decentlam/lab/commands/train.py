"""`decentlam train`: options to a recipe, a run, its report, and what to say at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from decentlam.lab.commands.report import newest
from decentlam.lab.names import (
    ALGORITHMS,
    DATASETS,
    DETECTION_DATASETS,
    DETECTORS,
    GPTS,
    MODELS,
    PRECISIONS,
    RECIPES,
    SCHEDULES,
    STABLE,
    TEXTS,
    TOPOLOGIES,
)
from decentlam.lab.terminal import (
    Json,
    console,
    one_of,
    out_option,
    print_json,
    print_table,
    say_loading,
    takes_options,
)
from decentlam.launch import launched_process

if TYPE_CHECKING:  # what takes seconds to import is imported where it is used
    from decentlam.lab.recipes import Recipe
    from decentlam.lab.train import Summary

log = logging.getLogger(__name__)

EXIT_CODES = {"finished": 0, "diverged": 1, "interrupted": 130}


def _option(*names: str, about: str, choices: Sequence[str] = (), listed: bool = True) -> Any:
    """Return an option of the recipe: left out, the recipe's own value counts."""
    among = f" One of {', '.join(choices)}." if choices and listed else ""
    callback = one_of(choices) if choices else None
    return typer.Option(*names, help=about + among, show_default=False, callback=callback)


Float: TypeAlias = float | None
Int: TypeAlias = int | None
Text: TypeAlias = str | None
ALL_MODELS = (*MODELS, *GPTS, *DETECTORS)
ALL_DATA = (*DATASETS, *TEXTS, *DETECTION_DATASETS)


@dataclass(frozen=True)
class TrainOptions:
    """The options of `decentlam train`: one for each field of a recipe, then those of the run."""

    recipe: Annotated[Text, _option(about="Start from this recipe.", choices=RECIPES)] = None
    method: Annotated[Text, _option(about="What nodes do.", choices=ALGORITHMS)] = None
    topology: Annotated[
        Text, _option(about="One of `decentlam topologies`.", choices=TOPOLOGIES, listed=False)
    ] = None
    nodes: Annotated[Int, _option("-n", "--nodes", about="Number of nodes.")] = None
    model: Annotated[Text, _option(about="What is trained.", choices=ALL_MODELS)] = None
    data: Annotated[Text, _option(about="On what.", choices=ALL_DATA)] = None
    data_path: Annotated[Text, _option(about="Where the data is.")] = None
    shards: Annotated[
        Text, _option(about="How data is split: iid, label-sorted:K or dirichlet:ALPHA.")
    ] = None
    batch: Annotated[Int, _option(about="Samples per step, of all nodes together.")] = None
    micro_batch: Annotated[
        Int, _option(about="Samples that a node takes at a time; gradients are added up.")
    ] = None
    epochs: Annotated[Float, _option(about="Passes over the training set.")] = None
    lr: Annotated[Float, _option(about="Learning rate for the whole batch.")] = None
    momentum: Annotated[Float, _option(about="beta of the method.")] = None
    weight_decay: Annotated[Float, _option(about="Added to the gradient, times x.")] = None
    stable: Annotated[
        Text, _option(about="Where momentum on changing weights diverges.", choices=STABLE)
    ] = None
    hyper: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of the method, as nesterov=true; repeatable."),
    ] = None
    schedule: Annotated[Text, _option(about="Of the rate.", choices=SCHEDULES)] = None
    warmup_epochs: Annotated[Float, _option(about="Length of the warm-up.")] = None
    warmup_from: Annotated[Float, _option(about="Its start, as a share of lr.")] = None
    seed: Annotated[Int, _option(about="Equal seeds give equal runs.")] = None
    precision: Annotated[Text, _option(about="Of numbers.", choices=PRECISIONS)] = None
    evaluate_every: Annotated[
        Float, _option(about="Epochs between evaluations, and checkpoints.")
    ] = None
    log_every: Annotated[Int, _option(about="Steps per record.")] = None
    image_size: Annotated[
        Int, _option(about="Detection: pixels of the shorter side of images.")
    ] = None
    weights: Annotated[
        Text, _option(about="Detection: a file that torchvision published, to start from.")
    ] = None
    simulate: Annotated[bool, typer.Option("--simulate", help="All nodes in this process.")] = False
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Go on when processes die, and start them again; see docs/survive.md."
        ),
    ] = False
    out: Annotated[Text, out_option("Run directory; default out/train/RECIPE-CHANGES.")] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or the newest.")
    ] = False
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run at a local address while it trains.")
    ] = False
    workers: Annotated[
        int, typer.Option(min=0, help="Processes per node that load data; 0: none.")
    ] = 0
    as_json: Json = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False

    def changes(self) -> dict[str, Any]:
        """Return what these options change in the recipe."""
        from decentlam.lab.recipes import Recipe

        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe)}
        changes = {name: value for name, value in given.items() if value is not None}
        if "hyper" in changes:
            changes["hyper"] = tuple(_pair(text) for text in changes["hyper"])
        return changes


@takes_options(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a model on nodes that average with their neighbors.

    Every node is a process: those that torchrun, mpirun or srun started, else new ones on this
    machine; with --simulate all nodes are in this process. Options change the recipe. Ctrl-C stops
    after a step and keeps a checkpoint; a second one stops at once. The run ends with a page,
    report.html in its directory.
    """
    launched = None if options.simulate else launched_process()
    if not options.quiet and (launched is None or launched.rank == 0):
        say_loading("torch and the recipe")
    from decentlam.lab.train import Stop
    from decentlam.lab.train import train as run
    from decentlam.launch.init import init

    changes = options.changes()
    # An elastic run may go on with another number of processes.
    processes = changes.pop("nodes", None) if options.elastic and options.resume else None
    place = launched
    if place is not None:
        init()
        changes.setdefault("nodes", place.num_processes)
    first = place is None or place.rank == 0
    recipe, directory, simulate = _plan_of_process_0(options, changes, launched=place is not None)

    def say(text: str) -> None:
        if first and not options.quiet:
            typer.echo(f"decentlam: {text}", err=True)

    announcement = "stopping after this step; Ctrl-C again to stop at once"
    stop = Stop(launched=place is not None, notify=lambda: say(announcement))
    with stop.listening(), contextlib.ExitStack() as shown:
        if options.watch and first:
            from decentlam.lab.watch import serving

            say(f"shown at {shown.enter_context(serving(directory))} while it trains")
        summary = run(
            recipe,
            directory,
            simulate,
            options.resume,
            elastic=options.elastic,
            processes=processes,
            workers=options.workers,
            quiet=options.quiet,
            stop=stop,
            note=say,
        )
    if first:
        _show(summary, recipe, options, _write_report(directory))
    raise typer.Exit(EXIT_CODES[summary.status])


def _write_report(directory: Path) -> Path | None:
    """Write the run's page; training has ended well even if that fails."""
    from decentlam.lab.report import write

    try:
        return write([directory], directory / "report.html")
    except Exception as error:
        log.warning("the run is complete, but not its report: %s: %s", type(error).__name__, error)
        return None


def _show(summary: Summary, recipe: Recipe, options: TrainOptions, report: Path | None) -> None:
    elastic = "--elastic " if options.elastic else ""
    again = f"decentlam train {elastic}--resume --out {summary.directory}"
    interrupted = summary.status == "interrupted"
    if summary.status == "diverged":
        typer.echo(f"decentlam: diverged: {' '.join(summary.message.split())}", err=True)
    if options.as_json:
        more = {"resume": again if interrupted else None, "report": report and str(report)}
        return print_json(dataclasses.asdict(summary) | more)
    if not options.quiet:
        from decentlam.lab.train.records import SCORES

        last = summary.evaluation or {}
        keys = SCORES[recipe.task]
        row = {"method": recipe.method, "status": summary.status, "steps": summary.step}
        print_table([row | {key: last.get(key) for key in keys} | {"seconds": summary.seconds}])
        console().print(f"\nWrote {report or summary.directory}")
    if interrupted:
        typer.echo(f"decentlam: interrupted at step {summary.step}; to go on: {again}", err=True)


# Which recipe, and where -------------------------------------------------------------------------


def _plan_of_process_0(
    options: TrainOptions, changes: dict[str, Any], launched: bool
) -> tuple[Recipe, Path, bool]:
    """Return the plan of process 0, on every process; its error is raised on every one."""
    from decentlam.checkpoint.all_processes import on_process_0
    from decentlam.lab.recipes import from_json
    from decentlam.network.network import connect

    def plan() -> tuple[Any, str, bool]:
        recipe, directory, simulate = _plan(options, changes, launched)
        return recipe.as_json(), str(directory), simulate

    network = connect()
    recipe, directory, simulate = network.gather(on_process_0(network, plan))[0]
    return from_json(recipe), Path(directory), simulate


def _plan(
    options: TrainOptions, changes: dict[str, Any], launched: bool
) -> tuple[Recipe, Path, bool]:
    """Return the recipe, where it is run, and whether it is simulated."""
    from decentlam.lab.recipes import make
    from decentlam.lab.train.records import RUN, read_recipe

    name = options.recipe
    if not options.resume:
        candidates = _numbered(_default_directory(name, changes))
        free = (path for path in candidates if not (path / RUN).exists())
        recipe = make(name or RECIPES[0], **changes)
        return recipe, Path(options.out) if options.out else next(free), options.simulate
    directory = Path(options.out) if options.out else newest()
    before, simulated = read_recipe(directory)
    recipe = make(name, **changes) if name else dataclasses.replace(before, **changes)
    return recipe, directory, options.simulate or (simulated and not launched)


def _default_directory(name: str | None, changes: dict[str, Any]) -> Path:
    """Name the recipe and what was changed in it: out/train/digits-dmsgd-lr0.1."""
    words = [name or RECIPES[0]]
    for field, value in changes.items():
        telling = isinstance(value, str)
        words.append(str(value) if telling else f"{field.replace('_', '-')}{value}")
    return Path("out") / "train" / re.sub(r"[^\w.:=-]+", "_", "-".join(words))[:100]


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in range(2, 10_000):
        yield path.with_name(f"{path.name}-{number}")


def _pair(text: str) -> tuple[str, Any]:
    """Split mu=0.5 into a name and a value: a number, true, false, or text."""
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
