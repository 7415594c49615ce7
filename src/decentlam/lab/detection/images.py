"""Training and test sets of annotated images, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.data.batches import load_items
from decentlam.lab.detection.annotations import AnnotatedImage

LONGEST = 5 / 3  # of a resized image, in shorter sides: 1333 for 800, 1000 for 600
_KEPT_BYTES = 2**28  # sets of images that take less are decoded once and kept
_TEST_PIXELS = 2**20  # of a test batch

# Images (3, h, w) of any sizes, from 0 to 1; for each its boxes and labels; and a seed for what the
# model draws: Faster R-CNN learns from a sample of its proposals.
DetectionBatch = tuple[list[Tensor], list[dict[str, Tensor]], int]
# Test images, each with its index in the test set and the factors it was resized by.
TestBatch = list[tuple[int, Tensor, tuple[float, float]]]


@dataclass(frozen=True, eq=False)
class DetectionData:
    """Annotated images, resized to a shorter side of `image_size` and at most 5/3 of that.

    Training batches are flipped at random. Images without boxes are trained on, too.
    """

    names: dict[int, str]  # of the labels, from 1 on; 0 is the background
    train: list[AnnotatedImage]
    test: list[AnnotatedImage]
    image_size: int
    skipped: list[str]  # the boxes that were left out, in words
    _kept: dict[AnnotatedImage, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def classes(self) -> int:
        """The number of labels, including the background and the gaps in COCO's ids."""
        return max(self.names) + 1

    @property
    def labels(self) -> Tensor:
        """Return what shards are sorted by: the main label of each training image."""
        return torch.tensor([image.main_label for image in self.train])

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> DetectionBatch:
        flipped = torch.randint(2, (len(indices),), generator=generator).bool().tolist()
        seed = int(torch.randint(2**31, (), generator=generator))
        images, targets = [], []
        for k, flip in zip(indices.tolist(), flipped, strict=True):
            annotated = self.train[k]
            image, learned = self.pixels(annotated), ~annotated.ignored
            boxes = torch.from_numpy(
                annotated.boxes[learned] * np.array(2 * _scale(annotated, image))
            ).float()
            if flip:
                image = image.flip(2)
                boxes = boxes[:, [2, 1, 0, 3]].mul_(boxes.new_tensor([-1.0, 1, -1, 1]))
                boxes[:, [0, 2]] += image.shape[2]
            images.append(image.float() / 255)
            targets.append({"boxes": boxes, "labels": torch.from_numpy(annotated.labels[learned])})
        return images, targets, seed

    def test_batches(self, workers: int = 0) -> Iterator[TestBatch]:
        """Yield the test set in order, never flipped."""
        pixels = max(1, round(LONGEST * self.image_size**2))
        batch = max(1, min(16, _TEST_PIXELS // pixels))
        count = -(-len(self.test) // batch)
        return load_items(partial(self._test_batch, batch), count, workers)

    def _test_batch(self, batch: int, k: int) -> TestBatch:
        found: TestBatch = []
        for at in range(len(self.test))[k * batch : (k + 1) * batch]:
            image = self.pixels(self.test[at])
            found.append((at, image.float() / 255, _scale(self.test[at], image)))
        return found

    def pixels(self, image: AnnotatedImage) -> Tensor:
        """Return the resized image, (3, h, w) uint8."""
        if image in self._kept:
            return self._kept[image]
        low, high = sorted((image.width, image.height))
        scale = min(self.image_size / low, LONGEST * self.image_size / high)
        decoded = _decoded(
            image, (max(1, round(scale * image.width)), max(1, round(scale * image.height)))
        )
        if decoded.numel() * (len(self.train) + len(self.test)) < _KEPT_BYTES:
            self._kept[image] = decoded
        return decoded


def _scale(image: AnnotatedImage, resized: Tensor) -> tuple[float, float]:
    return resized.shape[2] / image.width, resized.shape[1] / image.height


def _decoded(image: AnnotatedImage, size: tuple[int, int]) -> Tensor:
    from PIL import Image

    try:
        with Image.open(image.file) as opened:
            pixels = opened.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    except OSError as error:
        raise ValueError(f"{image.file} is not an image that can be read: {error}") from error
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()
