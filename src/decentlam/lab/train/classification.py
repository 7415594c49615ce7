"""Classification, of images or of the next byte: cross entropy, top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from decentlam.lab.data import Data, load
from decentlam.lab.models import make_model
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.tasks import Numerics, Scores

_VALUES = 2**23  # input values per test batch: 1,000 small images, 55 of ImageNet
_ESTIMATE_BATCHES, _ESTIMATE_BATCH = 8, 256
_ESTIMATE = 4  # a stream of random numbers apart from those of shards and batches

ImageBatch = tuple[Tensor, Tensor]  # images and labels
Sums = list[float]  # over the samples of a test batch: loss, top-1 hits, top-5 hits, samples


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

    def pieces(self, batch: ImageBatch, size: int | None) -> list[tuple[ImageBatch, float]]:
        inputs, labels = batch
        size = size or len(inputs)
        pieces = zip(inputs.split(size), labels.split(size), strict=True)
        return [((x, y), len(x) / len(inputs)) for x, y in pieces]

    def model(self) -> nn.Module:
        recipe, data = self.recipe, self.data
        return self.numerics.model(make_model(recipe.model, data.shape, data.classes, recipe.seed))

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        inputs, labels = self.numerics.inputs(batch[0]), batch[1].to(self.numerics.device)
        with self.numerics.autocast():
            return F.cross_entropy(model(inputs), labels)

    def settle(self, average: nn.Module) -> None:
        if self.recipe.batch_norm == "estimate":
            estimate_batch_norm(average, self.data, self.numerics, self.recipe.seed)

    def test_batches(self, workers: int) -> Iterator[ImageBatch]:
        size = max(1, min(1000, _VALUES // prod(self.data.shape)))
        return self.data.test_batches(size, workers)

    def score(self, model: nn.Module, batch: ImageBatch) -> Sums:
        return score(model, batch, self.numerics)

    def numbers(self, outcomes: Sequence[Sums]) -> Scores:
        loss, top1, top5, samples = map(sum, zip(*outcomes, strict=True))
        return {"top1": top1 / samples, "top5": top5 / samples, "loss": loss / samples}


@torch.no_grad()
def score(model: nn.Module, batch: ImageBatch, numerics: Numerics) -> Sums:
    """Sum loss and hits over the samples of a batch; the model is left in evaluation mode."""
    model.eval()
    inputs, labels = numerics.inputs(batch[0]), batch[1].to(numerics.device)
    with numerics.autocast():
        outputs = model(inputs)
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices == labels[:, None]
    loss = F.cross_entropy(outputs.double(), labels, reduction="sum")
    return [loss.item(), best[:, 0].sum().item(), best.sum().item(), float(labels.numel())]


@torch.no_grad()
def estimate_batch_norm(model: nn.Module, data: Data, numerics: Numerics, seed: int) -> None:
    """Set batch norm's statistics to those of this model on some training samples.

    The samples are drawn from the whole training set, the same ones on every node and at every
    evaluation: all nodes get the same statistics without talking.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over the batches
        layer.train()
    generator = torch.Generator().manual_seed(seed * 8 + _ESTIMATE)
    order = torch.randperm(len(data.labels), generator=generator)
    for indices in order[: _ESTIMATE_BATCHES * _ESTIMATE_BATCH].split(_ESTIMATE_BATCH):
        if len(indices) > 1:  # a single sample has no variance
            inputs, _ = data.train_batch(indices, generator)
            with numerics.autocast():
                model(numerics.inputs(inputs))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.eval()
