"""The training loop, the same for simulated nodes, processes and elastic runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from decentlam.errors import ExchangeError, NonFiniteError
from decentlam.lab.data import Batches
from decentlam.lab.data.loading import StepBatches
from decentlam.lab.train.engines import Engine
from decentlam.lab.train.meter import Agreement, Meter
from decentlam.lab.train.records import CHECKPOINT, RunOptions, RunWriter


class DivergenceError(Exception):
    """Training ran into numbers that are not finite."""

    def __init__(self, step: int, seconds: float, message: str) -> None:
        super().__init__(step, seconds, message)
        self.step, self.seconds, self.message = step, seconds, message


def train_steps(
    options: RunOptions,
    batches: Batches,
    engine: Engine,
    writer: RunWriter,
    meter: Meter,
    asked_to_stop: Callable[[], bool],
) -> str:
    """Train to the last step, or until all agree to stop: "finished" or "interrupted"."""
    recipe, steps, workers = options.recipe, writer.steps, options.workers
    evaluate_every = max(1, round(recipe.evaluate_every * writer.steps_per_epoch))
    agreement = Agreement(engine.together, asked_to_stop)
    checkpoint = writer.directory / CHECKPOINT
    # In an elastic run the next step recovers from a death during an evaluation or a checkpoint.
    survived = (ExchangeError,) if options.elastic else ()
    with contextlib.closing(engine.batches(batches, steps, workers)) as source:  # stops workers
        while engine.step < steps:
            lr = engine.lr
            train_step(engine, source, meter)
            done = engine.step  # a node of an elastic run that was behind may have skipped some
            if done % recipe.log_every == 0 or done == steps:
                values = meter.take(engine.together)
                samples = recipe.batch_per_node * engine.num_nodes
                values["images_per_second"] = samples / values["step_seconds"]
                writer.write("step", done, lr=lr, nodes=engine.num_nodes, **values)
            if done % evaluate_every == 0 or done == steps:
                with contextlib.suppress(*survived):
                    writer.write("evaluation", done, **engine.evaluate(workers))
                    saving = engine.save(checkpoint, meter)
                    if done == steps:
                        saving.wait()
            if done < steps and agreement.stop_after(done):
                engine.save(checkpoint, meter).wait()
                return "interrupted"
    return "finished"


def train_step(engine: Engine, source: Iterator[StepBatches], meter: Meter) -> None:
    """Take one step on the next batches, and measure it."""
    step, begun = engine.step, time.perf_counter()
    batches = next(source)
    loaded = time.perf_counter()
    try:
        losses = engine.train(batches)
    except NonFiniteError as error:
        raise DivergenceError(step, meter.seconds, str(error)) from error
    ended = time.perf_counter()
    meter.add(losses, step_seconds=ended - begun, data_seconds=loaded - begun, **engine.cost)
