"""Classification: images and their labels, cross entropy, top-1 accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decentlam import SimulatedModule
from decentlam.algorithms import Algorithm
from decentlam.lab.data import Data, load
from decentlam.lab.models import make_model
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import evaluation
from decentlam.lab.train.evaluation import Scores
from decentlam.lab.train.numerics import Numerics
from decentlam.lab.train.tasks.base import Numbers
from decentlam.topology import Topology

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Classification:
    """A `Task`."""

    recipe: Recipe
    data: Data
    numerics: Numerics

    main = "top1"
    shapes = None
    notes: ClassVar[list[str]] = []

    @classmethod
    def of(cls, recipe: Recipe, numerics: Numerics) -> Classification:
        return cls(recipe, load(recipe.data, recipe.data_path), numerics)

    @property
    def labels(self) -> Tensor:
        return self.data.labels

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self.data.train_batch(indices, generator)

    def pieces(self, batch: Batch, size: int | None) -> list[tuple[Batch, float]]:
        inputs, labels = batch
        size = size or len(inputs)
        pieces = zip(inputs.split(size), labels.split(size), strict=True)
        return [((x, y), len(x) / len(inputs)) for x, y in pieces]

    def model(self) -> nn.Module:
        recipe, data = self.recipe, self.data
        return self.numerics.model(make_model(recipe.model, data.shape, data.classes, recipe.seed))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = self.numerics.inputs(batch[0]), batch[1].to(self.numerics.device)
        with self.numerics.autocast():
            return F.cross_entropy(model(inputs), labels)

    def simulated(self, algorithm: Algorithm, network: Topology) -> Stacked:
        return Stacked(
            SimulatedModule(
                self.model(),
                algorithm,
                network,
                lr=self.recipe.lr,
                weight_decay=self.recipe.weight_decay,
                autocast=self.numerics.autocast_dtype,
            ),
            self.numerics,
        )

    def settle(self, average: nn.Module) -> None:
        if self.recipe.batch_norm == "estimate":
            evaluation.estimate_batch_norm(average, self.data, self.numerics, self.recipe.seed)

    def test_batches(self, workers: int) -> Iterator[Batch]:
        return self.data.test_batches(evaluation.batch_size(self.data), workers)

    def score(self, model: nn.Module, batch: Batch) -> Scores:
        return evaluation.score(model, batch, self.numerics)

    def numbers(self, outcomes: Sequence[Scores]) -> Numbers:
        loss, top1, top5, samples = map(sum, zip(*outcomes, strict=True))
        return {"top1": top1 / samples, "top5": top5 / samples, "loss": loss / samples}

    def illustrate(self, directory: Path, outcomes: Sequence[Scores]) -> None:
        """There is nothing to show."""


@dataclass(frozen=True, eq=False)
class Stacked:
    """All nodes' models in one call, which `SimulatedModule` can do where nothing branches."""

    modules: SimulatedModule
    numerics: Numerics

    @property
    def x(self) -> Tensor:
        return self.modules.x

    def step(self, batches: Sequence[Batch], lr: float, micro_batch: int | None) -> Tensor:
        inputs = torch.stack([x for x, _ in batches])
        labels = torch.stack([y for _, y in batches])
        return self.modules.step(
            F.cross_entropy,
            self.numerics.inputs(inputs),
            labels.to(self.numerics.device),
            lr,
            micro_batch,
        )

    def node(self, rank: int) -> nn.Module:
        return self.modules.node(rank)

    def averaged(self) -> nn.Module:
        return self.modules.averaged()

    def consensus_distance(self) -> float:
        return self.modules.consensus_distance()

    def state_dict(self) -> dict[str, Any]:
        return self.modules.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.modules.load_state_dict(saved)
