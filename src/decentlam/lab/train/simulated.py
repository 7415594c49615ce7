"""All nodes of a run in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from decentlam.checkpoint import Saving, directory
from decentlam.checkpoint.saving import settle
from decentlam.errors import CheckpointError
from decentlam.exchange.network import ALONE
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.engine import KEEP, Cost, Evaluation, models_sent
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.numerics import Numerics
from decentlam.lab.train.tasks import Task
from decentlam.lab.train.tasks.base import Batch, record


class Simulated:
    """An `Engine` around all nodes' models."""

    alone = True

    def __init__(
        self, recipe: Recipe, task: Task, numerics: Numerics, steps_per_epoch: int
    ) -> None:
        self.recipe, self.task, self.numerics = recipe, task, numerics
        self.nodes = range(recipe.nodes)
        torch.manual_seed(recipe.seed)  # of dropout; nothing else draws from torch's own numbers
        self._algorithm, self._network, _ = recipe.chosen()
        self.modules = task.simulated(self._algorithm, self._network)
        self.parameters = self.modules.x.shape[1]
        self._factor = recipe.factor(steps_per_epoch)
        self._step = 0

    @property
    def lr(self) -> float:
        return self.recipe.lr * self._factor(self._step)

    @property
    def cost(self) -> Cost:
        last = max(0, self._step - 1)
        sent = models_sent(self._algorithm, self._network, last)
        return Cost(0.0, sent * self.parameters * self.modules.x.element_size())

    def step(self, batches: Sequence[Batch]) -> Tensor:
        losses = self.modules.step(batches, self.lr, self.recipe.micro_batch)
        self._step += 1
        return losses

    def evaluate(self, workers: int) -> Evaluation:
        average = self.modules.averaged()
        self.task.settle(average)
        models = [average, *(self.modules.node(i) for i in self.nodes)]
        batches = self.task.test_batches(workers)
        by_batch = [[self.task.score(model, batch) for model in models] for batch in batches]
        outcomes = [list(of_model) for of_model in zip(*by_batch, strict=True)]
        averaged, *nodes = map(self.task.numbers, outcomes)
        distance = self.modules.consensus_distance()
        return Evaluation(record(self.task, averaged, nodes, distance), outcomes[0])

    def mean(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def highest(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def save(self, path: Path, meter: Meter) -> Saving:
        settle()
        content = {
            "nodes": self.modules.state_dict(),
            "meter": meter.state_dict(),
            "rng": torch.get_rng_state(),
        }
        meta = {"method": "simulated", "step": self._step, "num_nodes": 1, "processes_per_node": 1}
        return Saving(ALONE, path, meta, content, KEEP, background=True)

    def load(self, path: Path, meter: Meter) -> int:
        settle()
        meta, content = directory.read(directory.locate(path), 0)
        if content.keys() != {"nodes", "meter", "rng"}:
            raise CheckpointError(f"{path} is not the checkpoint of a simulated run")
        self.modules.load_state_dict(content["nodes"])
        meter.load_state_dict(content["meter"])
        torch.set_rng_state(content["rng"])
        self._step = int(meta["step"])
        return self._step
