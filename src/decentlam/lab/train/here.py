"""This process's part of a run: all simulated nodes, or one node of the group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from decentlam.checkpoint.together import together
from decentlam.exchange.network import ALONE, Network, connect
from decentlam.lab.data import Batches, load, split
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import display, loop, records
from decentlam.lab.train.engine import Engine
from decentlam.lab.train.loop import Job
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.numerics import Numerics, device_here
from decentlam.lab.train.processes import Processes
from decentlam.lab.train.simulated import Simulated

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
    recipe, directory = order.recipe, order.directory
    network = ALONE if order.simulate else connect()
    together(network, lambda: _check(order, network))
    job, engine = _build(order, network)
    meter, step = Meter(), 0
    checkpoint = directory / records.CHECKPOINT
    if order.resume and network.gather(checkpoint.exists())[0]:
        step = engine.load(checkpoint, meter)
    steps = recipe.steps(job.batches.steps_per_epoch)
    if network.rank != 0:
        status, done = loop.run(job, engine, meter, _nothing, wished, step)
        return Summary(status, str(directory), done, steps, meter.seconds, None)
    if (note := recipe.chosen()[2]) is not None:
        log.warning("%s", note)
    info = records.describe(recipe, engine, order.simulate, job.batches.steps_per_epoch, directory)
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


def _check(order: Order, network: Network) -> None:
    if network.rank == 0:
        records.check(order.directory, order.recipe, order.simulate, order.resume)


def _build(order: Order, network: Network) -> tuple[Job, Engine]:
    recipe = order.recipe

    def read() -> Job:
        data = load(recipe.data, recipe.data_path)
        shards = split(data.labels, recipe.nodes, recipe.shards, recipe.seed)
        batches = Batches(shards, recipe.batch_per_node, recipe.seed)
        return Job(recipe, order.directory, data, batches, order.workers)

    job = together(network, read)
    backend = None if network.group is None else str(dist.get_backend(network.group))
    numerics = Numerics(recipe.precision, device_here(backend))
    kind = Simulated if order.simulate else Processes
    return job, kind(recipe, job.data, numerics, job.batches.steps_per_epoch)


def _nothing(kind: str, step: int, **values: Any) -> None:
    """Only process 0 writes."""
