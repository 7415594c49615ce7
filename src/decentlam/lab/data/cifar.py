"""CIFAR-10 and CIFAR-100, 60,000 color images of 32 x 32, as published or a folder per class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.data.memory import InMemory, crop_and_flip

STATISTICS = {  # mean and std per channel
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
PICKLES = {10: "cifar-10-batches-py", 100: "cifar-100-python"}


def cifar(path: str | Path | None = None, classes: int = 10) -> InMemory:
    """Read CIFAR, which is trained on with the usual augmentation: see `crop_and_flip`."""
    root = None if path is None else Path(path)
    if root is not None and root.name == PICKLES[classes]:
        root = root.parent
    if root is not None and (root / PICKLES[classes]).is_dir():
        train, test = (_from_pickles(root, classes, kind) for kind in (True, False))
    elif root is not None and (root / "train").is_dir() and (root / "test").is_dir():
        train, test = (_from_folders(root / kind, classes) for kind in ("train", "test"))
    else:
        raise ValueError(
            f"{'no path was given' if root is None else f'there is none in {root}'}: "
            f"cifar{classes} needs --data-path, a folder that has {PICKLES[classes]} (unpack "
            f"cifar-{classes}-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html "
            "there), or train/CLASS/*.png and test/CLASS/*.png"
        )
    mean, std = STATISTICS[classes]
    return InMemory(classes, *train, *test, mean, std, crop_and_flip)


cifar10 = partial(cifar, classes=10)
cifar100 = partial(cifar, classes=100)


def _from_pickles(root: Path, classes: int, train: bool) -> tuple[Tensor, Tensor]:
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


def _from_folders(folder: Path, classes: int) -> tuple[Tensor, Tensor]:
    """Read a folder for each class, numbered in alphabetical order, as the published labels are."""
    from torchvision.datasets import ImageFolder

    try:
        found = ImageFolder(folder)
        images = np.stack([found.loader(file) for file, _ in found.samples])
    except (OSError, ValueError) as error:  # a class without images, or sizes that differ
        raise ValueError(f"{folder} should have CLASS/*.png: {error}") from error
    shape = (len(found.classes), *images.shape[1:3])
    if shape != (classes, 32, 32):
        raise ValueError(
            f"{folder} has {shape[0]} classes of {shape[1]} x {shape[2]} pixels; cifar{classes} "
            f"has {classes} of 32 x 32"
        )
    return _channels_first(images), torch.tensor(found.targets)


def _channels_first(images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
