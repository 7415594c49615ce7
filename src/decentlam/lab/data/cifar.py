"""CIFAR-10 and CIFAR-100, 60,000 color images of 32 x 32, in any of the layouts they come in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.data.memory import InMemory, crop_and_flip

Part = tuple[Tensor, Tensor]  # images (N, 3, 32, 32) uint8, labels (N,) int64
STATISTICS = {  # mean and std per channel
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
PICKLES = {10: "cifar-10-batches-py", 100: "cifar-100-python"}


def cifar(path: str | Path | None = None, classes: int = 10) -> InMemory:
    """Read CIFAR, which is trained on with the usual augmentation: see `crop_and_flip`."""
    train, test = _read(None if path is None else Path(path), classes)
    return InMemory(
        f"cifar{classes}", classes, *train, *test, *STATISTICS[classes], augment=crop_and_flip
    )


cifar10 = partial(cifar, classes=10)
cifar100 = partial(cifar, classes=100)


def _read(root: Path | None, classes: int) -> tuple[Part, Part]:
    if root is not None:
        if root.name == PICKLES[classes]:
            root = root.parent
        if (root / PICKLES[classes]).is_dir():
            return _from_pickles(root, classes, True), _from_pickles(root, classes, False)
        if (root / "train").is_dir() and (root / "test").is_dir():
            return _from_tree(root / "train", classes), _from_tree(root / "test", classes)
    raise ValueError(
        f"{'no path was given' if root is None else f'there is none in {root}'}: cifar{classes} "
        f"needs --data-path, a folder that has {PICKLES[classes]} (unpack "
        f"cifar-{classes}-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html there), "
        f"or train/CLASS/*.png and test/CLASS/*.png"
    )


def _from_pickles(root: Path, classes: int, train: bool) -> Part:
    """Read the published files. Torchvision compares checksums, so no unknown pickle is opened."""
    from torchvision import datasets

    kind: Any = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
    try:
        read = kind(root, train=train, download=False)
    except RuntimeError as error:
        raise ValueError(
            f"{root / PICKLES[classes]} is not as published: a file is missing, or its checksum is "
            f"wrong; unpack cifar-{classes}-python.tar.gz anew"
        ) from error
    return _channels_first(read.data), torch.tensor(read.targets)


def _from_tree(folder: Path, classes: int) -> Part:
    """Read a folder for each class, numbered in alphabetical order, as the published labels are."""
    from torchvision.datasets import ImageFolder

    try:
        found = ImageFolder(str(folder))
    except FileNotFoundError as error:  # a class without images, or no class
        raise ValueError(f"{folder} should have CLASS/*.png: {error}") from error
    if len(found.classes) != classes:
        count = len(found.classes)
        raise ValueError(f"{folder} has {count} folders; cifar{classes} has {classes} classes")
    images = []
    for file, _ in found.samples:
        image = found.loader(file)
        if image.size != (32, 32):
            raise ValueError(f"{file} is {image.width} x {image.height}, not 32 x 32")
        images.append(np.asarray(image))
    return _channels_first(np.stack(images)), torch.tensor(found.targets)


def _channels_first(images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
