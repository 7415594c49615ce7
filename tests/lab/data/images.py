"""Images made up for tests of data."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from decentlam.lab.data.memory import InMemory, crop_and_flip

WORKERS = min(2, len(os.sched_getaffinity(0)))  # torch warns when there are more than cores


# Python 3.12 and 3.13 warn when torch's loader forks a process with threads, as it does by default.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def in_memory(count: int = 40, classes: int = 4) -> InMemory:
    images = torch.from_numpy(random_images(count, 3, 8, 8))
    labels = torch.arange(count) % classes
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    return InMemory(classes, images, labels, images[:9], labels[:9], mean, std, crop_and_flip)


def plain(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalized the textbook way, from (N, H, W, C) bytes, in float64."""
    return torch.from_numpy((images / 255 - np.array(mean)) / np.array(std)).permute(0, 3, 1, 2)


def write_image_folder(root: Path) -> Path:
    """A folder in ImageNet's layout: three classes of other sizes, three images each."""
    sizes = {"n01": (300, 260), "n02": (200, 400), "n03": (64, 64)}
    for name, (height, width) in sizes.items():
        for part in ("train", "val"):
            (root / part / name).mkdir(parents=True)
            for k, mode in enumerate(("RGB", "L", "RGBA")):
                image = Image.fromarray(random_images(1, height, width, 3, seed=k)[0])
                image.convert(mode).save(root / part / name / f"{k}.png")
    return root


def write_images(root: Path, parts: tuple[str, str], classes: int, each: int, size: int) -> Path:
    draw = np.random.default_rng(0)
    for part in parts:
        for label in range(classes):
            (root / part / f"n{label:02d}").mkdir(parents=True)
            for k in range(each):
                pixels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / f"n{label:02d}" / f"{k}.png")
    return root
