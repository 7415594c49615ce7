"""Classification, of images or of the next byte: cross entropy, top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decentlam.lab.data import Data, load
from decentlam.lab.models import make_model
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.tasks import Numerics, Scores

_VALUES = 2**23  # input values per test batch: 1,000 small images, 55 of ImageNet

ImageBatch = tuple[Tensor, Tensor]  # images and labels
Sums = list[float]  # over the samples of a test batch: loss, top-1 hits, top-5 hits, samples


@dataclass(frozen=True, eq=False)
class Classification:
    """The task of classifying images, or the next byte of a text: from data to batches, from a
    batch to a loss, from a model to its scores."""

    recipe: Recipe
    data: Data
    numerics: Numerics

    main = "top1"  # the name of the main score in records
    notes: ClassVar[list[str]] = []  # what a user should know of the data before training starts

    @classmethod
    def of(cls, recipe: Recipe, numerics: Numerics) -> Classification:
        return cls(recipe, load(recipe.data, recipe.data_path), numerics)

    def pieces(self, batch: ImageBatch, size: int | None) -> list[tuple[ImageBatch, float]]:
        """Split the batch into pieces of so many samples, each with its share of them."""
        inputs, labels = batch
        size = size or len(inputs)
        pieces = zip(inputs.split(size), labels.split(size), strict=True)
        return [((x, y), len(x) / len(inputs)) for x, y in pieces]

    def model(self) -> nn.Module:
        """Return the initial model, the same on every node."""
        recipe, data = self.recipe, self.data
        return self.numerics.model(make_model(recipe.model, data.shape, data.classes, recipe.seed))

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Return the mean over the samples, one number to call `backward` on."""
        inputs, labels = self.numerics.inputs(batch[0]), batch[1].to(self.numerics.device)
        with self.numerics.autocast():
            return F.cross_entropy(model(inputs), labels)

    def test_batches(self, workers: int) -> Iterator[ImageBatch]:
        size = max(1, min(1000, _VALUES // prod(self.data.shape)))
        return self.data.test_batches(size, workers)

    @torch.no_grad()
    def score(self, model: nn.Module, batch: ImageBatch) -> Sums:
        """Return what the model does on a test batch; it is left in evaluation mode."""
        model.eval()
        inputs, labels = self.numerics.inputs(batch[0]), batch[1].to(self.numerics.device)
        with self.numerics.autocast():
            outputs = model(inputs)
        best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices == labels[:, None]
        loss = F.cross_entropy(outputs.double(), labels, reduction="sum")
        return [loss.item(), best[:, 0].sum().item(), best.sum().item(), float(labels.numel())]

    def numbers(self, outcomes: Sequence[Sums]) -> Scores:
        """Return the scores of a model from what it did on all test batches, in any order."""
        loss, top1, top5, samples = map(sum, zip(*outcomes, strict=True))
        return {"top1": top1 / samples, "top5": top5 / samples, "loss": loss / samples}
