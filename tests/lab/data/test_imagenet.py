"""ImageNet, or any folder of images by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from decentlam.lab.data import load
from tests.lab.data.images import (
    WORKERS,
    forks,
    plain,
    seeded,
    write_image_folder,
)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("imagenet"))


def test_imagenet_folders_give_crops_of_224_drawn_from_the_generator(image_folder: Path):
    data = load("imagenet", image_folder)
    assert (data.classes, data.shape, data.num_test) == (3, (3, 224, 224), 9)
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    picked = torch.tensor([8, 0, 0, 4])
    before = torch.get_rng_state()
    (first, labels), (again, _), (other, _) = (
        data.train_batch(picked, seeded(s)) for s in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert labels.tolist() == [2, 0, 0, 1]
    assert first.shape == (4, 3, 224, 224) and first.dtype == torch.float32
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[1], first[2])


@forks
def test_imagenet_is_tested_on_the_middle_of_the_image_resized_to_256(image_folder: Path):
    data = load("imagenet", image_folder)
    inputs, labels = map(torch.cat, zip(*data.test_batches(4), strict=True))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for k, (size, corner) in {0: ((256, 295), (16, 36)), 3: ((512, 256), (144, 16))}.items():
        with Image.open(image_folder / "val" / f"n0{k // 3 + 1}" / "0.png") as image:
            width, height = size
            resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(resized)
        left, top = corner
        middle = pixels[top : top + 224, left : left + 224]
        expected = plain(middle[None], IMAGENET_MEAN, IMAGENET_STD)[0].float()
        torch.testing.assert_close(inputs[k], expected)
    ahead = map(torch.cat, zip(*data.test_batches(4, workers=WORKERS), strict=True))
    assert torch.equal(next(ahead), inputs) and torch.equal(next(ahead), labels)
