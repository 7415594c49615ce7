"""`decentlam train --elastic`: a run that goes on when its processes die, and takes in new ones.

Samples are dealt to whoever is there. A new process takes its state from another; checkpoints are
for the day that all are gone, and hold how samples were dealt.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from decentlam.checkpoint import directory as saves
from decentlam.checkpoint import load_checkpoint, save_checkpoint
from decentlam.errors import CheckpointError, ExchangeError, NonFiniteError
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import display, records
from decentlam.lab.train.engine import KEEP, Engine
from decentlam.lab.train.here import Summary
from decentlam.lab.train.numerics import Numerics, device_here
from decentlam.lab.train.tasks import Task, make_task
from decentlam.lab.train.tasks.base import record
from decentlam.launch.local import run_here, survivors
from decentlam.membership import generations
from decentlam.membership.deal import Deal, Place
from decentlam.membership.record import Change, turns
from decentlam.optimizer import DecentralizedOptimizer
from decentlam.options import Stable

log = logging.getLogger(__name__)


@dataclass
class Dealt:
    """How samples were dealt until a checkpoint that the run began with, and are since."""

    past: tuple[Change, ...] = ()
    step: int = 0
    optimizer: DecentralizedOptimizer | None = None

    @property
    def place(self) -> Place:
        assert self.optimizer is not None
        here = self.optimizer.place
        return here.after(self.past, self.step) if self.past else here

    def state_dict(self) -> dict[str, Any]:
        return {"history": [astuple(c) for c in self.place.history]}


def train_elastic(
    recipe: Recipe,
    directory: Path,
    *,
    quiet: bool,
    note: Callable[[str], None],
    stopped: Callable[[], bool],
    resume: bool = False,
    processes: int | None = None,
) -> Summary:
    """Trains in new processes of this machine, as many as the recipe has nodes or as `processes`
    says, and starts those again that die."""
    if recipe.shards != "iid":
        raise ValueError(
            f"--elastic deals samples to whoever is there, so shards must be iid; got "
            f"{recipe.shards!r}. Pass --shards iid"
        )
    if processes is not None and processes < 1:
        raise ValueError(f"nodes must be 1 or more, got {processes}")
    with records.claimed(directory, recipe, simulated=False, resume=resume):
        dealt = _read(directory / records.CHECKPOINT) if resume else Dealt()
        work = (recipe, directory, quiet, dealt)
        collect = functools.partial(survivors, note=note, stopped=stopped)
        found = run_here(_node, processes or recipe.nodes, work, elastic=collect)
    written = [s for s in found if s.evaluation is not None] or found
    if written:
        return cast(Summary, written[0])
    return Summary("interrupted", str(directory), 0, 0, 0.0, None)


def _read(path: Path) -> Dealt:
    """How the samples of the saved run were dealt; from the beginning, if it saved nothing."""
    place = saves.find(saves.local(path))
    if place is None:
        return Dealt()
    meta, content = saves.read(place, 0)
    try:
        history = content["others"]["dealt"]["history"]
        past = tuple(
            Change(step, size, tuple(lost), since, *map(turns, owed))
            for step, size, lost, since, *owed in history
        )
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(
            f"the run in {path.parent} was not started with --elastic; resume it without"
        ) from None
    return Dealt(past, meta["step"])


def _node(recipe: Recipe, directory: Path, quiet: bool, dealt: Dealt) -> Summary:
    numerics = Numerics(recipe.precision, device_here("gloo"))
    task = make_task(recipe, numerics)
    deal = Deal(len(task.labels), recipe.batch_per_node, recipe.seed)
    per_epoch = max(1, len(task.labels) // recipe.batch)
    steps, factor = recipe.steps(per_epoch), recipe.factor(per_epoch)
    every = max(1, round(recipe.evaluate_every * per_epoch))
    model = task.model()
    optimizer = DecentralizedOptimizer(
        list(model.named_parameters()),
        recipe.algorithm(),
        recipe.lr,
        weight_decay=recipe.weight_decay,
        topology=recipe.topology,
        stable=cast(Stable, recipe.stable),
        elastic=True,
        model=model,
    )
    run, checkpoint = generations.current(), directory / records.CHECKPOINT
    assert run is not None
    torch.manual_seed(recipe.seed + run.me)
    dealt.optimizer = optimizer
    if dealt.past and not run.joins:
        load_checkpoint(checkpoint, model=model, optimizer=optimizer, dealt=None)
    begun = time.perf_counter()
    with _Writer(recipe, directory, quiet, steps, per_epoch, optimizer) as writer:
        while (step := optimizer.runtime.index) < steps:
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * factor(step)
            place = dealt.place
            generator = torch.Generator().manual_seed(deal.position(place))
            batch = task.train_batch(deal.indices(place), generator)
            loss = _step(task, model, optimizer, batch, recipe.micro_batch)
            done = optimizer.runtime.index
            if done % recipe.log_every == 0 or done == steps:
                lr = optimizer.param_groups[0]["lr"]
                nodes = optimizer.network.num_nodes
                writer.write("step", done, epoch=done / per_epoch, lr=lr, loss=loss, nodes=nodes)
            together = done >= optimizer.runtime.alone_until  # else this node is behind
            if (done % every == 0 or done == steps) and together:
                with contextlib.suppress(ExchangeError):  # the next step sees to it
                    numbers = _evaluate(task, model, optimizer)
                    if numbers is not None:
                        writer.write("evaluation", done, epoch=done / per_epoch, **numbers)
                    save_checkpoint(
                        checkpoint, model=model, optimizer=optimizer, dealt=dealt, keep=KEEP
                    )
        seconds = time.perf_counter() - begun
        writer.write("end", steps, status="finished", seconds=seconds)
        evaluation = writer.last_evaluation
    return Summary("finished", str(directory), steps, steps, seconds, evaluation)


def _step(
    task: Task, model: nn.Module, optimizer: DecentralizedOptimizer, batch: Any, size: int | None
) -> float:
    model.train()
    optimizer.zero_grad()
    pieces, total = task.pieces(batch, size), 0.0
    for k, (piece, share) in enumerate(pieces):
        with contextlib.nullcontext() if k == len(pieces) - 1 else optimizer.no_sync():
            loss = task.loss(model, piece)
            (loss * share).backward()
        total += loss.item() * share
    try:
        optimizer.step()
    except NonFiniteError as error:
        raise ValueError(str(error)) from error
    return total


def _evaluate(task: Task, model: nn.Module, optimizer: DecentralizedOptimizer) -> Any:
    """Node 0 scores the averaged model and its own."""
    with optimizer.averaged(model):
        average = copy.deepcopy(model)
    distance = optimizer.consensus_distance()
    if optimizer.network.node != 0:
        return None
    task.settle(average)
    batches = list(task.test_batches(0))
    own = task.numbers([task.score(model, batch) for batch in batches])
    averaged = task.numbers([task.score(average, batch) for batch in batches])
    return record(task, averaged, [own], distance)


@dataclass
class _Size:
    parameters: int


class _Writer:
    """Node 0 writes the run directory; when that one dies, the next takes over."""

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        quiet: bool,
        steps: int,
        per_epoch: int,
        optimizer: DecentralizedOptimizer,
    ) -> None:
        self._recipe, self._directory, self._per_epoch = recipe, directory, per_epoch
        self._quiet, self._steps, self._optimizer = quiet, steps, optimizer
        self._files: records.Records | None = None
        self._screen: display.Display = display.Silent()

    @property
    def last_evaluation(self) -> Any:
        return None if self._files is None else self._files.last_evaluation

    def write(self, kind: str, step: int, **values: Any) -> None:
        if self._optimizer.network.node != 0:
            self._close()
            return
        if self._files is None:
            self._open(step - 1)
        assert self._files is not None
        self._screen.show(self._files.write(kind, step, **values))

    def _open(self, done: int) -> None:
        sizes = [p.numel() for g in self._optimizer.param_groups for p in g["params"]]
        size = cast(Engine, _Size(sum(sizes)))
        info = records.describe(self._recipe, size, False, self._per_epoch, self._directory)
        info["command"] += " --elastic"
        first = 0 if not (self._directory / records.RUN).exists() else done
        self._files = records.Records(self._directory, info, first)
        title = f"{self._recipe.method} on {self._recipe.data}"
        self._screen = display.choose(self._quiet, title, self._steps, first)

    def _close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._screen.close()
        self._files, self._screen = None, display.Silent()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
