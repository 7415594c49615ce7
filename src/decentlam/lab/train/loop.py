"""The training loop, the same for simulated nodes, processes and elastic runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from decentlam.errors import ExchangeError, NonFiniteError
from decentlam.lab.data import Batches
from decentlam.lab.data.batches import StepBatches
from decentlam.lab.train.engines import Engine
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.records import CHECKPOINT, RunOptions, RunWriter
from decentlam.lab.train.tasks import Scores, Task


class DivergenceError(Exception):
    """Training ran into numbers that are not finite."""

    def __init__(self, step: int, seconds: float, message: str) -> None:
        super().__init__(step, seconds, message)
        self.step, self.seconds, self.message = step, seconds, message


def train_steps(
    options: RunOptions,
    task: Task,
    batches: Batches,
    engine: Engine,
    writer: RunWriter,
    meter: Meter,
    asked_to_stop: Callable[[], bool],
) -> str:
    """Train to the last step, or until all agree to stop: "finished" or "interrupted"."""
    recipe, steps, workers = options.recipe, writer.steps, options.workers
    factor = recipe.factor(writer.steps_per_epoch)
    evaluate_every = max(1, round(recipe.evaluate_every * writer.steps_per_epoch))
    checkpoint = writer.directory / CHECKPOINT
    # In an elastic run the next step recovers from a death during an evaluation or a checkpoint.
    survived = (ExchangeError,) if options.elastic else ()
    with contextlib.closing(engine.batches(batches, steps, workers)) as source:  # stops workers
        while engine.step < steps:
            lr = recipe.lr * factor(engine.step)
            train_step(engine, source, lr, meter)
            done = engine.step  # a node of an elastic run that was behind may have skipped some
            evaluates = done % evaluate_every == 0 or done == steps
            stop = False
            # With every checkpoint a record, so that a resumed run writes the same ones.
            if done % recipe.log_every == 0 or evaluates:
                # A node must not leave while a neighbor waits for its next message: all stop here.
                values, stop = meter.take(engine.together, asked_to_stop())
                samples = recipe.batch_per_node * engine.num_nodes
                values["images_per_second"] = samples / values["step_seconds"]
                writer.write("step", done, lr=lr, nodes=engine.num_nodes, **values)
            if evaluates:
                with contextlib.suppress(*survived):
                    writer.write("evaluation", done, **evaluate(engine, task, workers))
                    saving = engine.save(checkpoint)
                    if done == steps:
                        saving.wait()
            if done < steps and stop:
                engine.save(checkpoint).wait()
                return "interrupted"
    return "finished"


def train_step(engine: Engine, source: Iterator[StepBatches], lr: float, meter: Meter) -> None:
    """Take one step on the next batches, and measure it."""
    step, begun = engine.step, time.perf_counter()
    batches = next(source)
    loaded = time.perf_counter()
    try:
        losses = engine.train(batches, lr)
    except NonFiniteError as error:
        raise DivergenceError(step, meter.seconds, str(error)) from error
    ended = time.perf_counter()
    meter.add(losses, step_seconds=ended - begun, data_seconds=loaded - begun, **engine.cost)


def evaluate(engine: Engine, task: Task, workers: int) -> Scores:
    """Score the averaged model and every node's own on the whole test set.

    A process scores its own models on all of it and the averaged one on a share of it, in one
    pass, because images may have to be decoded.
    """
    network = engine.network
    average, models = engine.models()
    own: list[list[Any]] = [[] for _ in models]
    share = []
    batch: Any
    for k, batch in enumerate(task.test_batches(workers)):
        for outcomes, model in zip(own, models, strict=True):
            outcomes.append(task.score(model, batch))
        if k % network.num_nodes == network.node:
            share.append(task.score(average, batch))
    reports = network.gather(([task.numbers(outcomes) for outcomes in own], share))
    averaged = task.numbers([outcome for _, outcomes in reports for outcome in outcomes])
    nodes = [scores for of_process, _ in reports for scores in of_process]
    main = [scores[task.main] or 0.0 for scores in nodes]

    def mean(name: str) -> float | None:
        known = [scores[name] for scores in nodes if scores[name] is not None]
        return sum(known) / len(known) if len(known) == len(nodes) else None

    return {
        **{f"averaged_{name}": value for name, value in averaged.items()},
        **{f"nodes_{name}": mean(name) for name in averaged},
        f"nodes_{task.main}_min": min(main),
        f"nodes_{task.main}_max": max(main),
        "consensus_distance": engine.consensus_distance(),
    }
