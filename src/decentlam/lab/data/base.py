"""The interface of a data set: batches by index, labels to shard by, a test set."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """A source of samples from which batches are made."""

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Any: ...


class Data(Protocol):
    """A labelled set of images; `load` returns one, held in memory or read from a folder."""

    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) as the model sees it."""

    @property
    def labels(self) -> Tensor:
        """The training labels, (N,) int64."""

    @property
    def num_test(self) -> int: ...

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W), float32, normalized and augmented, and labels (B,).

        The augmentation is drawn from `generator` and from nothing else.
        """

    def test_batches(self, batch: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the test set in order, never augmented; the last batch may be smaller.

        With `workers` > 0, images that have to be decoded are decoded by that many processes.
        """


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
