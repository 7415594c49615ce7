"""All nodes of a run in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decentlam.checkpoint import directory
from decentlam.lab.data import Data
from decentlam.lab.models import make_model
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import evaluation
from decentlam.lab.train.engine import Cost, models_sent
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.numerics import Numerics
from decentlam.module import SimulatedModule


class Simulated:
    """An `Engine` around a SimulatedModule."""

    alone = True

    def __init__(
        self, recipe: Recipe, data: Data, numerics: Numerics, steps_per_epoch: int
    ) -> None:
        self.recipe, self.data, self.numerics = recipe, data, numerics
        self.nodes = range(recipe.nodes)
        torch.manual_seed(recipe.seed)  # of dropout; nothing else draws from torch's own numbers
        self._algorithm, self._network, _ = recipe.chosen()
        model = make_model(recipe.model, data.shape, data.classes, recipe.seed)
        self.modules = SimulatedModule(
            numerics.model(model),
            self._algorithm,
            self._network,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            autocast=numerics.autocast_dtype,
        )
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

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        losses = self.modules.step(
            F.cross_entropy,
            self.numerics.inputs(inputs),
            labels.to(self.numerics.device),
            self.lr,
            self.recipe.micro_batch,
        )
        self._step += 1
        return losses

    def evaluate(self, workers: int) -> dict[str, Any]:
        average = self.modules.averaged()
        if self.recipe.batch_norm == "estimate":
            evaluation.estimate_batch_norm(average, self.data, self.numerics, self.recipe.seed)
        models = [average, *(self.modules.node(i) for i in self.nodes)]
        scores = [[0.0] * 4 for _ in models]
        for batch in self.data.test_batches(evaluation.batch_size(self.data), workers):
            for total, model in zip(scores, models, strict=True):
                evaluation.add(total, evaluation.score(model, batch, self.numerics))
        return evaluation.numbers(scores[0], scores[1:], self.modules.consensus_distance())

    def mean(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def highest(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def save(self, path: Path, meter: Meter) -> None:
        content = {
            "nodes": self.modules.state_dict(),
            "meter": meter.state_dict(),
            "rng": torch.get_rng_state(),
        }
        directory.begin(path)
        files = {directory.file_of(0): directory.write(path, 0, content)}
        directory.commit(path, {"step": self._step, "simulated": True, "files": files})

    def load(self, path: Path, meter: Meter) -> int:
        place = directory.locate(path)
        meta = directory.read_meta(place)
        content = directory.read(place, meta, 0)
        self.modules.load_state_dict(content["nodes"])
        meter.load_state_dict(content["meter"])
        torch.set_rng_state(content["rng"])
        self._step = meta["step"]
        return self._step
