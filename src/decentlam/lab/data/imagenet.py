"""ImageNet, or any folder of images by class, decoded and augmented when a batch asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.data.base import normalized
from decentlam.lab.data.loading import load_items

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def imagenet(path: str | Path | None = None) -> ImageFolders:
    """Read train/CLASS/* and val/CLASS/*; classes are numbered in alphabetical order."""
    from torchvision.datasets import ImageFolder

    needs = "imagenet needs --data-path, a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG"
    if path is None:
        raise ValueError(f"no path was given: {needs}")
    try:
        train, test = ImageFolder(Path(path) / "train"), ImageFolder(Path(path) / "val")
    except FileNotFoundError as error:
        raise ValueError(f"{needs}, which {path} is not: {error}") from error
    if train.classes != test.classes:
        some = sorted(set(train.classes) ^ set(test.classes))[:3]
        raise ValueError(f"{path}: train and val have different classes, such as {some}")
    return ImageFolders(
        "imagenet", len(train.classes), *_arrays(train.samples), *_arrays(test.samples)
    )


@dataclass(frozen=True, eq=False)
class ImageFolders:
    """Files of images; training takes a random crop resized to 224 and a random flip (He et al.,
    2015).

    Tests take the middle 224 pixels of the image resized to 256.
    """

    name: str
    classes: int
    files: np.ndarray  # (N,) bytes: a list of str would be copied into every loading process
    labels: Tensor  # (N,) int64
    test_files: np.ndarray
    test_labels: Tensor

    shape = (3, 224, 224)

    @property
    def num_test(self) -> int:
        return len(self.test_labels)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        from torchvision.transforms import v2

        transform = v2.Compose(
            [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        )
        seed = int(torch.randint(2**31, (), generator=generator))
        # Torchvision draws from torch's global generator: lend it a seed, then restore it. Not
        # torch.manual_seed, which would seed GPUs too.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            inputs = _decoded(self.files[indices.numpy()], transform)
        return inputs, self.labels[indices]

    def test_batches(self, batch: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        count = -(-len(self.test_files) // batch)
        return load_items(partial(self._test_batch, batch), count, workers)

    def _test_batch(self, batch: int, k: int) -> tuple[Tensor, Tensor]:
        from torchvision.transforms import v2

        transform = v2.Compose(
            [v2.Resize(256, antialias=True), v2.CenterCrop(224), v2.PILToTensor()]
        )
        part = slice(k * batch, (k + 1) * batch)
        return _decoded(self.test_files[part], transform), self.test_labels[part]


def _decoded(files: np.ndarray, transform: Callable[[object], Tensor]) -> Tensor:
    """Return (B, 3, 224, 224), normalized."""
    from PIL import Image

    images = []
    for file in map(os.fsdecode, files):
        try:
            with Image.open(file) as image:
                images.append(transform(image.convert("RGB")))
        except OSError as error:
            raise ValueError(f"{file} is not an image that can be read: {error}") from error
    return normalized(torch.stack(images), MEAN, STD)


def _arrays(samples: list[tuple[str, int]]) -> tuple[np.ndarray, Tensor]:
    files = np.array([os.fsencode(file) for file, _ in samples])
    return files, torch.tensor([label for _, label in samples])
