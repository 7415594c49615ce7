"""This process's part of a run: all simulated nodes, or one node of the group."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from decentlam.checkpoint.directory import find
from decentlam.checkpoint.together import on_process_0, together
from decentlam.exchange.network import ALONE, Network, connect
from decentlam.lab.data import Batches, split
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import display, loop, records
from decentlam.lab.train.engine import Engine
from decentlam.lab.train.loop import Job
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.numerics import Numerics, device_here
from decentlam.lab.train.processes import Processes
from decentlam.lab.train.simulated import Simulated
from decentlam.lab.train.tasks import make_task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What `train` was asked for."""

    recipe: Recipe
    directory: Path
    simulate: bool
    resume: bool
    workers: int
    quiet: bool


@dataclass(frozen=True)
class Summary:
    """How a run ended; process 0 has its last evaluation."""

    status: str  # finished, interrupted or diverged
    directory: str
    step: int
    steps: int
    seconds: float
    evaluation: dict[str, Any] | None
    message: str = ""


def train_here(order: Order, wished: Callable[[], bool]) -> Summary:
    """Trains and, on process 0, writes the run directory; raises `loop.DivergenceError`."""
    network = ALONE if order.simulate else connect()
    claim = records.claimed(order.directory, order.recipe, order.simulate, order.resume)
    with contextlib.ExitStack() as held:
        on_process_0(network, lambda: held.enter_context(claim))
        return _train(order, network, wished)


def _train(order: Order, network: Network, wished: Callable[[], bool]) -> Summary:
    recipe, directory = order.recipe, order.directory
    job, engine = _build(order, network)
    meter, step = Meter(), 0
    checkpoint = directory / records.CHECKPOINT
    if order.resume and network.gather(on_process_0(network, lambda: bool(find(checkpoint))))[0]:
        step = engine.load(checkpoint, meter)
    steps = recipe.steps(job.batches.steps_per_epoch)
    if network.rank != 0:
        status, done = loop.run(job, engine, meter, _nothing, wished, step)
        return Summary(status, str(directory), done, steps, meter.seconds, None)
    if (note := recipe.chosen()[2]) is not None:
        log.warning("%s", note)
    for note in [] if order.quiet else job.task.notes:  # a study would say them for every run
        log.warning("%s", note)
    info = records.describe(recipe, engine, order.simulate, job.batches.steps_per_epoch, directory)
    info["notes"] = job.task.notes
    writer = records.Records(directory, info, step)
    screen = display.choose(order.quiet, f"{recipe.method} on {recipe.data}", steps, step)

    def write(kind: str, step: int, **values: Any) -> None:
        screen.show(writer.write(kind, step, **values))

    try:
        status, done = loop.run(job, engine, meter, write, wished, step)
        seconds = meter.seconds
        write("end", done, status=status, seconds=seconds)
    finally:
        screen.close()
        writer.close()
    return Summary(status, str(directory), done, steps, seconds, writer.last_evaluation)


def _build(order: Order, network: Network) -> tuple[Job, Engine]:
    recipe = order.recipe
    backend = None if network.group is None else str(dist.get_backend(network.group))
    numerics = Numerics(recipe.precision, device_here(backend))

    def read() -> Job:
        task = make_task(recipe, numerics)
        shards = split(task.labels, recipe.nodes, recipe.shards, recipe.seed)
        piece = min(recipe.micro_batch or recipe.batch_per_node, recipe.batch_per_node)
        batches = Batches(shards, recipe.batch_per_node, recipe.seed, task.shapes, piece)
        return Job(recipe, order.directory, task, batches, order.workers, network.rank == 0)

    job = together(network, read)
    kind = Simulated if order.simulate else Processes
    return job, kind(recipe, job.task, numerics, job.batches.steps_per_epoch)


def _nothing(kind: str, step: int, **values: Any) -> None:
    """Only process 0 writes."""
