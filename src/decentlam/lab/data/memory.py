"""Data sets small enough to be held in memory, as bytes, and the augmentation of CIFAR."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class InMemory:
    """Images as bytes, (N, C, H, W) uint8, made float32 batch by batch."""

    classes: int
    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    test_images: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]  # per channel, for bytes / 255
    std: tuple[float, ...]
    augment: Augment | None = None  # bytes to bytes of the same shape

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) as the model sees it."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def num_test(self) -> int:
        return len(self.test_labels)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W), float32, normalized and augmented, and labels (B,).

        The augmentation is drawn from `generator` and from nothing else.
        """
        images = self.images.index_select(0, indices)
        if self.augment is not None:
            images = self.augment(images, generator)
        return normalized(images, self.mean, self.std), self.labels.index_select(0, indices)

    def test_batches(self, batch: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the test set in order, never augmented; the last batch may be smaller.

        With `workers` > 0, images that have to be decoded are decoded by that many processes.
        """
        return (
            (normalized(images, self.mean, self.std), labels)
            for images, labels in zip(
                self.test_images.split(batch), self.test_labels.split(batch), strict=True
            )
        )


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Pad with zeros, crop at random to the old size, and flip with probability 1/2.

    The usual augmentation of CIFAR. Zeros are black: the padding comes before the normalization.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, top, left, H, W), a view
    top, left = torch.randint(2 * padding + 1, (2, count), generator=generator)
    mirrored = torch.randint(2, (count, 1, 1, 1), generator=generator).bool()
    cropped = windows[torch.arange(count), :, top, left]
    return torch.where(mirrored, cropped.flip(3), cropped)


def normalized(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return (images / 255 - mean) / std per channel, of (B, C, H, W) bytes, as float32."""
    scale, shift = _scale_and_shift(mean, std)
    return images.float().mul_(scale).add_(shift)


@cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return both as (C, 1, 1); cached, because making them takes as long as a small batch."""
    scale = torch.tensor([1 / (255 * s) for s in std])
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
    return scale.view(-1, 1, 1), shift.view(-1, 1, 1)
