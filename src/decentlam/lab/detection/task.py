"""The task of object detection: images and their boxes, a detector's own losses, its scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from decentlam.lab.detection import DetectionData, load_boxes
from decentlam.lab.detection.detectors import make_detector
from decentlam.lab.detection.images import DetectionBatch, TestBatch
from decentlam.lab.detection.scores import MAIN, Detections, Scores, from_output, score
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.tasks import Numerics


@dataclass(frozen=True, eq=False)
class Detection:
    """The `Task` of object detection."""

    recipe: Recipe
    data: DetectionData
    numerics: Numerics

    main = MAIN

    @classmethod
    def of(cls, recipe: Recipe, numerics: Numerics) -> Detection:
        """Make the task of a recipe, its data read and checked."""
        data = load_boxes(recipe.data, recipe.data_path, recipe.image_size)
        return cls(recipe, data, numerics)

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of the data."""
        skipped = self.data.skipped
        what = "1 bad box" if len(skipped) == 1 else f"{len(skipped)} bad boxes, the first"
        return [f"left out {what}: {skipped[0]}"] if skipped else []

    def pieces(self, batch: DetectionBatch, size: int | None) -> list[tuple[DetectionBatch, float]]:
        images, targets, seed = batch
        size = size or len(images)
        parts = [slice(at, at + size) for at in range(0, len(images), size)]
        return [
            ((images[p], targets[p], seed + p.start), len(images[p]) / len(images)) for p in parts
        ]

    def model(self) -> nn.Module:
        recipe = self.recipe
        return self.numerics.model(
            make_detector(
                recipe.model, self.data.classes, recipe.image_size, recipe.seed, recipe.weights
            )
        )

    def loss(self, model: nn.Module, batch: DetectionBatch) -> Tensor:
        """Return the sum of the detector's losses. Its random choices are seeded by the batch, so
        that simulated and real nodes make the same."""
        pixels, annotated, seed = batch
        images = [self.numerics.inputs(image) for image in pixels]
        targets = [{name: self.numerics.inputs(t[name]) for name in t} for t in annotated]
        on_gpu = self.numerics.device.type == "cuda"
        with torch.random.fork_rng([self.numerics.device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                torch.cuda.manual_seed(seed)
            with self.numerics.autocast():
                losses: dict[str, Tensor] = model(images, targets)
        return torch.stack(list(losses.values())).sum()

    def test_batches(self, workers: int) -> Iterator[TestBatch]:
        return self.data.test_batches(workers)

    @torch.no_grad()
    def score(self, model: nn.Module, batch: TestBatch) -> list[Detections]:
        model.eval()
        with self.numerics.autocast():
            outputs = model([self.numerics.inputs(image) for _, image, _ in batch])
        return [
            from_output(at, output, scale)
            for (at, _, scale), output in zip(batch, outputs, strict=True)
        ]

    def numbers(self, outcomes: Sequence[list[Detections]]) -> Scores:
        return score(self.data.test, self.data.names, chain.from_iterable(outcomes))
