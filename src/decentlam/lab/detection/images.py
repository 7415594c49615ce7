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


# What a reader returns: the names of the labels, the training set, the test set.
AnnotatedSets = tuple[dict[int, str], list[AnnotatedImage], list[AnnotatedImage]]


@dataclass(frozen=True, eq=False)
class DetectionBatch:
    """Images (3, h, w) of any sizes, from 0 to 1, and for each its boxes and labels.

    `seed` is for what the model draws: Faster R-CNN learns from a sample of its proposals.
    """

    images: list[Tensor]
    targets: list[dict[str, Tensor]]
    seed: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, part: slice) -> DetectionBatch:
        return DetectionBatch(self.images[part], self.targets[part], self.seed + (part.start or 0))


@dataclass(frozen=True, eq=False)
class TestBatch:
    """Some test images, their indices in the test set, and the factors they were resized by."""

    images: list[Tensor]
    indices: list[int]
    scales: list[tuple[float, float]]

    __test__ = False  # no test, whatever pytest makes of the name


@dataclass(frozen=True, eq=False)
class DetectionData:
    """Annotated images, resized to a shorter side of `image_size` and at most 5/3 of that.

    Training batches are flipped at random. Images without boxes are trained on, too.
    """

    name: str
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

    @property
    def shared(self) -> int:
        """The number of test images that are training images, too."""
        return len({image.file for image in self.test} & {image.file for image in self.train})

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> DetectionBatch:
        flipped = torch.randint(2, (len(indices),), generator=generator).bool().tolist()
        seed = int(torch.randint(2**31, (), generator=generator))
        images, targets = [], []
        for k, flip in zip(indices.tolist(), flipped, strict=True):
            image = self.pixels(self.train[k])
            target = self._target(self.train[k], image)
            if flip:
                image = image.flip(2)
                boxes = target["boxes"]
                target["boxes"] = boxes[:, [2, 1, 0, 3]].mul_(boxes.new_tensor([-1.0, 1, -1, 1]))
                target["boxes"][:, [0, 2]] += image.shape[2]
            images.append(image.float() / 255)
            targets.append(target)
        return DetectionBatch(images, targets, seed)

    def test_batches(self, workers: int = 0) -> Iterator[TestBatch]:
        """Yield the test set in order, never flipped."""
        pixels = max(1, round(LONGEST * self.image_size**2))
        batch = max(1, min(16, _TEST_PIXELS // pixels))
        count = -(-len(self.test) // batch)
        return load_items(partial(self._test_batch, batch), count, workers)

    def _test_batch(self, batch: int, k: int) -> TestBatch:
        indices = list(range(k * batch, min((k + 1) * batch, len(self.test))))
        images = [self.pixels(self.test[at]) for at in indices]
        scales = [
            (pixels.shape[2] / self.test[at].width, pixels.shape[1] / self.test[at].height)
            for pixels, at in zip(images, indices, strict=True)
        ]
        return TestBatch([pixels.float() / 255 for pixels in images], indices, scales)

    def pixels(self, image: AnnotatedImage) -> Tensor:
        """Return the resized image, (3, h, w) uint8."""
        if image in self._kept:
            return self._kept[image]
        decoded = _decoded(image, resized(image, self.image_size))
        if decoded.numel() * (len(self.train) + len(self.test)) < _KEPT_BYTES:
            self._kept[image] = decoded
        return decoded

    def _target(self, image: AnnotatedImage, pixels: Tensor) -> dict[str, Tensor]:
        scale = np.array(2 * [pixels.shape[2] / image.width, pixels.shape[1] / image.height])
        learned = ~image.ignored
        return {
            "boxes": torch.from_numpy(image.boxes[learned] * scale).float(),
            "labels": torch.from_numpy(image.labels[learned]),
        }


def resized(image: AnnotatedImage, shorter: int) -> tuple[int, int]:
    """Return width and height after resizing."""
    low, high = sorted((image.width, image.height))
    scale = min(shorter / low, LONGEST * shorter / high)
    return max(1, round(scale * image.width)), max(1, round(scale * image.height))


def _decoded(image: AnnotatedImage, size: tuple[int, int]) -> Tensor:
    from PIL import Image

    try:
        with Image.open(image.file) as opened:
            pixels = opened.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    except OSError as error:
        raise ValueError(f"{image.file} is not an image that can be read: {error}") from error
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()
