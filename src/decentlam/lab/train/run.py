"""`train`: from a recipe to a run directory, on simulated nodes or on processes."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from decentlam.checkpoint.all_processes import on_all_processes, on_process_0
from decentlam.errors import LaunchError
from decentlam.lab.data import Batches, split
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.engines import Engine, ProcessEngine, SimulatedEngine
from decentlam.lab.train.loop import DivergenceError, Meter, train_steps
from decentlam.lab.train.records import (
    CHECKPOINT,
    RunOptions,
    RunWriter,
    claimed,
    write_interruption,
)
from decentlam.lab.train.stop import Stop
from decentlam.lab.train.tasks import Numerics, Task, make_task
from decentlam.lab.values import Record, explained
from decentlam.launch import launch, launched_process
from decentlam.launch.init import init
from decentlam.launch.local import run_here, survivors
from decentlam.network import groups
from decentlam.network.network import ALONE, Network, connect

log = logging.getLogger(__name__)

_DIVERGED = "decentlam train diverged"  # a key of the group's store, which says where and when


@dataclass(frozen=True)
class Summary:
    """The end of a run; process 0 has its last evaluation."""

    status: str  # finished, interrupted or diverged
    directory: str
    step: int
    steps: int
    seconds: float
    evaluation: Record | None
    message: str = ""


def train(
    recipe: Recipe,
    directory: Path,
    simulate: bool = False,
    resume: bool = False,
    *,
    elastic: bool = False,
    processes: int | None = None,
    workers: int = 0,
    quiet: bool = True,
    stop: Stop | None = None,
    note: Callable[[str], None] = log.warning,
) -> Summary:
    """Train as the recipe says and write the run directory.

    `simulate` runs all nodes in this process. Otherwise each node is a process: those of the
    launcher that started this one, if there is one, else `recipe.nodes` new ones on this machine.
    `resume` continues the run in `directory` from its checkpoint, which must be there. `workers`
    processes per node load the data. `stop` is looked at with every step record to see whether to
    end the run early. `elastic` starts `processes` new ones (unless given, one per node), and those
    again that die, of which `note` is told.
    """
    options = RunOptions(recipe, directory, simulate, resume, elastic, workers, quiet)
    stop = stop or Stop()
    launched = dist.is_initialized() or launched_process() is not None
    if elastic:
        if simulate or launched:
            raise ValueError(
                "--elastic starts processes of its own; leave out --simulate, and torchrun"
            )
        return _train_elastic(options, processes, stop, note)
    if simulate:
        # Dropout is seeded by the recipe.
        with claimed(options), torch.random.fork_rng(devices=[]):
            return train_node(options, lambda: stop.requested)
    if not launched:
        return _train_in_new_processes(options, stop)
    init()
    network = connect()
    if network.num_processes != recipe.nodes:
        raise ValueError(
            f"the recipe has {recipe.nodes} nodes, but {network.num_processes} processes "
            f"were started; pass --nodes {network.num_processes}, or start as many"
        )
    with contextlib.ExitStack() as held:
        on_process_0(network, lambda: held.enter_context(claimed(options)))
        return train_node(options, lambda: stop.requested)


def _train_in_new_processes(options: RunOptions, stop: Stop) -> Summary:
    """Start a process per node on this machine. A file asks them to stop."""
    nodes = options.recipe.nodes
    backend = "nccl" if torch.cuda.device_count() >= nodes else "gloo"
    with claimed(options), tempfile.TemporaryDirectory() as directory:
        asked = Path(directory) / "stop"
        stop.forward = asked.touch
        try:
            summary: Summary = launch(_new_process, nodes, (options, asked), backend)[0]
            return summary
        except LaunchError as error:
            if stop.requested and "killed by SIGTERM" in str(error):  # it had not started to train
                raise KeyboardInterrupt from None
            if isinstance(error.__cause__, ValueError | OSError):  # the user's, in one line
                raise ValueError(str(error.__cause__)) from None
            if (text := explained(error.__cause__)) is not None:
                raise LaunchError(f"{str(error).split(' failed:')[0]}: {text}") from None
            raise
        finally:
            stop.forward = None


def _new_process(options: RunOptions, asked: Path) -> Summary:
    # timeout, SLURM and containers send it to all processes, not only to the one that waits.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.touch())
    return train_node(options, asked.exists)


def _train_elastic(
    options: RunOptions, processes: int | None, stop: Stop, note: Callable[[str], None]
) -> Summary:
    recipe, directory = options.recipe, options.directory
    if recipe.shards != "iid":
        raise ValueError(
            f"--elastic gives samples to whoever is there, so shards must be iid; got "
            f"{recipe.shards!r}. Pass --shards iid"
        )
    if processes is not None and processes < 1:
        raise ValueError(f"nodes must be 1 or more, got {processes}")
    with claimed(options):
        collect = functools.partial(survivors, note=note, stopped=lambda: stop.requested)
        work = (options, bool)  # bool() is False: whoever started them ends them
        results = run_here(train_node, processes or recipe.nodes, work, elastic=collect)
    written = [summary for summary in results if summary.evaluation is not None] or results
    if not written:  # all were ended, with what they had not saved
        return Summary("interrupted", str(directory), write_interruption(directory), 0, 0.0, None)
    summary: Summary = written[0]
    return summary


def train_node(options: RunOptions, asked_to_stop: Callable[[], bool]) -> Summary:
    """Take this process's part in a run: all simulated nodes, or one node of the group it is in.

    Process 0 writes the run directory.
    """
    recipe, directory = options.recipe, options.directory
    # A process that joins an elastic run does all of this while the others train.
    network = ALONE if options.simulate or options.elastic else connect()
    distributed: Any = dist.distributed_c10d
    store = None if network.group is None else distributed._get_default_store()
    numerics = Numerics(recipe.precision, _device(network, options.elastic))
    task, batches = on_all_processes(network, lambda: _read_data(recipe, numerics, options.elastic))
    steps_per_epoch = max(1, len(task.data.labels) // recipe.batch)
    engine: Engine
    if options.simulate:
        engine = SimulatedEngine(recipe, task)
    else:
        engine = ProcessEngine(recipe, task, options.elastic)
    meter = Meter()
    if options.resume:
        engine.load(directory / CHECKPOINT)
    if engine.writes:
        _warn(recipe, task, options)
    message = ""
    with RunWriter(options, engine, steps_per_epoch, task.notes) as writer:
        engine.watch(directory, writer.steps)
        try:
            status = train_steps(options, task, batches, engine, writer, meter, asked_to_stop)
            done, seconds = engine.step, meter.seconds
        except (DivergenceError, RuntimeError) as error:
            if options.elastic and isinstance(error, DivergenceError):
                raise ValueError(error.message) from error  # ends the run of all nodes
            status, (done, seconds, message) = "diverged", _divergence(error, store)
        engine.close()
        writer.write("end", done, status=status, seconds=seconds)
        evaluation = writer.last_evaluation
    if status == "diverged" and store is not None:
        # Closes connections, and so releases whoever waits for this node.
        groups.destroy_default_group(alone=True)
    return Summary(status, str(directory), done, writer.steps, seconds, evaluation, message)


def _read_data(recipe: Recipe, numerics: Numerics, elastic: bool) -> tuple[Task, Batches]:
    task = make_task(recipe, numerics)
    everything = [torch.arange(len(task.data.labels))]
    shards = (
        everything if elastic else split(task.data.labels, recipe.nodes, recipe.shards, recipe.seed)
    )
    return task, Batches(shards, recipe.batch_per_node, recipe.seed)


def _device(network: Network, elastic: bool) -> torch.device:
    """Return the GPU of this process, unless there is none or its messages travel by gloo."""
    gloo = elastic or (
        network.group is not None and "nccl" not in str(dist.get_backend(network.group))
    )
    if gloo or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _warn(recipe: Recipe, task: Task, options: RunOptions) -> None:
    reason = None if options.elastic else recipe.chosen()[2]  # elastic optimizers say it themselves
    if reason is not None:
        log.debug("%s", reason)
    if not options.quiet:  # a study would say what its data lacks for every run
        for text in task.notes:
            log.warning("%s", text)


def _divergence(error: Exception, store: dist.Store | None) -> tuple[int, float, str]:
    """Return step, seconds and message of a divergence, which is shared with all nodes, because
    the others fail when the node that diverged leaves. Raise any other error."""
    if isinstance(error, DivergenceError):
        if store is not None:
            store.set(_DIVERGED, json.dumps(error.args))
        return error.step, error.seconds, error.message
    if store is None or not store.check([_DIVERGED]):
        raise error
    step, seconds, message = json.loads(store.get(_DIVERGED))
    return step, seconds, message
