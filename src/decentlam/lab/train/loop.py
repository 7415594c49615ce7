"""The training loop, the same for simulated and for real nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from decentlam.errors import NonFiniteError
from decentlam.lab.data import Batches, feed
from decentlam.lab.data.feed import Step
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.engine import Engine
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.records import CHECKPOINT
from decentlam.lab.train.stop import Agreement
from decentlam.lab.train.tasks import Task

Write = Callable[..., object]  # (kind, step, **values); does nothing where nobody records


class DivergenceError(Exception):
    """Training ran into numbers that are not finite."""

    def __init__(self, step: int, seconds: float, message: str) -> None:
        super().__init__(step, seconds, message)
        self.step, self.seconds, self.message = step, seconds, message


@dataclass(frozen=True)
class Job:
    """What the loop needs besides the nodes."""

    recipe: Recipe
    directory: Path
    task: Task
    batches: Batches
    workers: int
    writes: bool  # whether this process writes the run directory

    def epoch(self, step: int) -> float:
        return step / self.batches.steps_per_epoch


def run(
    job: Job, engine: Engine, meter: Meter, write: Write, wished: Callable[[], bool], first: int
) -> tuple[str, int]:
    """Trains from step `first` to the end, or until all agree to stop; (status, steps done)."""
    recipe, per_epoch = job.recipe, job.batches.steps_per_epoch
    steps = recipe.steps(per_epoch)
    evaluate_every = max(1, round(recipe.evaluate_every * per_epoch))
    agreement = Agreement(engine, wished)
    supply = feed(job.task, job.batches, engine.nodes, first, steps, job.workers)
    with contextlib.closing(supply):  # stops the workers
        for done in range(first + 1, steps + 1):
            lr = engine.lr
            _step(engine, supply, meter, done)
            if done % recipe.log_every == 0 or done == steps:
                values = meter.take(engine.mean)
                values["images_per_second"] = recipe.batch / values["step_seconds"]
                write("step", done, epoch=job.epoch(done), lr=lr, **values)
            if done % evaluate_every == 0 or done == steps:
                evaluation = engine.evaluate(job.workers)
                write("evaluation", done, epoch=job.epoch(done), **evaluation.numbers)
                if job.writes:
                    job.task.illustrate(job.directory, evaluation.averaged)
                saving = engine.save(job.directory / CHECKPOINT, meter)
                if done == steps:
                    saving.wait()
            if done < steps and agreement.stop_after(done):
                engine.save(job.directory / CHECKPOINT, meter).wait()
                return "interrupted", done
    return "finished", steps


def _step(engine: Engine, supply: Iterator[Step], meter: Meter, number: int) -> None:
    begun = time.perf_counter()
    batches = next(supply)
    loaded = time.perf_counter()
    try:
        losses = engine.step(batches)
    except NonFiniteError as error:
        raise DivergenceError(number - 1, meter.seconds, str(error)) from error
    ended, cost = time.perf_counter(), engine.cost
    meter.add(
        losses,
        step_seconds=ended - begun,
        data_seconds=loaded - begun,
        wait_seconds=cost.wait_seconds,
        bytes_sent=cost.bytes_sent,
    )
