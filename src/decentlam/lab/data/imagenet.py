"""ImageNet, or any folder of images by class, decoded and augmented when a batch asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentlam.lab.data.batches import load_items
from decentlam.lab.data.memory import normalized

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
    return ImageFolders(train, test, torch.tensor(train.targets))


@dataclass(frozen=True, eq=False)
class ImageFolders:
    """Files of images; training takes a random crop resized to 224 and a random flip (He et al.,
    2015).

    Tests take the middle 224 pixels of the image resized to 256.
    """

    train: Any  # torchvision's ImageFolder
    test: Any
    labels: Tensor  # (N,) int64

    shape = (3, 224, 224)

    @property
    def classes(self) -> int:
        return len(self.train.classes)

    @property
    def num_test(self) -> int:
        return len(self.test)

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
            return _batch(self.train, indices.tolist(), transform)

    def test_batches(self, batch: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        return load_items(partial(self._test_batch, batch), -(-self.num_test // batch), workers)

    def _test_batch(self, batch: int, k: int) -> tuple[Tensor, Tensor]:
        from torchvision.transforms import v2

        transform = v2.Compose(
            [v2.Resize(256, antialias=True), v2.CenterCrop(224), v2.PILToTensor()]
        )
        return _batch(self.test, range(self.num_test)[k * batch : (k + 1) * batch], transform)


def _batch(
    folder: Any, indices: list[int] | range, transform: Callable[[object], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the images, (B, 3, 224, 224), normalized, and their labels."""
    images = []
    for file, _ in (folder.samples[k] for k in indices):
        try:
            images.append(transform(folder.loader(file)))
        except OSError as error:
            raise ValueError(f"{file} is not an image that can be read: {error}") from error
    labels = torch.tensor([folder.targets[k] for k in indices])
    return normalized(torch.stack(images), MEAN, STD), labels
