"""CIFAR in the layouts that it comes in."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from decentlam.lab.data import load
from decentlam.lab.data.cifar import PICKLES
from tests.lab.data.images import (
    plain,
    random_images,
)


def write_tree(root: Path, classes: int, size: int = 32) -> tuple[np.ndarray, list[int]]:
    """Two training images and one for testing in each class; returns the training set."""
    images = random_images(2 * classes, size, size, 3)
    for k, image in enumerate(images):
        for part in ["train", "test"][: 2 - k % 2]:
            folder = root / part / f"class{k // 2:03}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{k:03}.png")
    return images, [k // 2 for k in range(len(images))]


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_is_read_from_a_tree_of_png_files(tmp_path: Path, classes: int):
    images, labels = write_tree(tmp_path, classes)
    data = load(f"cifar{classes}", tmp_path)
    assert (data.classes, data.shape, data.num_test) == (classes, (3, 32, 32), classes)
    assert data.labels.tolist() == labels
    assert np.array_equal(data.images.permute(0, 2, 3, 1), images)
    (inputs, targets), *more = data.test_batches(2 * classes)
    assert not more and targets.tolist() == list(range(classes))
    expected = plain(images[::2], data.mean, data.std)
    torch.testing.assert_close(inputs.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_is_read_from_the_published_pickles(tmp_path: Path, monkeypatch, classes: int):
    """Made-up pickles in the published layout; torchvision is told their checksums."""
    from torchvision import datasets

    kind = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
    folder = tmp_path / PICKLES[classes]
    folder.mkdir()

    def write(name: str, content: dict) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    key = "labels" if classes == 10 else "fine_labels"
    checksums, images = {}, []
    for name, _ in [*kind.train_list, *kind.test_list]:
        images.append(random_images(4, 3 * 32 * 32, seed=len(images)))
        checksums[name] = write(name, {"data": images[-1], key: [0, classes - 1, 2, 1]})
    names = {kind.meta["key"]: [f"class{k}" for k in range(classes)]}
    meta = {**kind.meta, "md5": write(kind.meta["filename"], names)}
    with pytest.raises(ValueError, match=r"checksum is wrong; unpack cifar-\d+-python.tar.gz anew"):
        load(f"cifar{classes}", tmp_path)
    for part in ("train_list", "test_list"):
        listed = [[name, checksums[name]] for name, _ in getattr(kind, part)]
        monkeypatch.setattr(kind, part, listed)
    monkeypatch.setattr(kind, "meta", meta)
    for path in (tmp_path, folder):
        data = load(f"cifar{classes}", path)
        count = len(kind.train_list)
        assert data.labels.tolist() == [0, classes - 1, 2, 1] * count
        assert np.array_equal(data.images.reshape(4 * count, -1), np.concatenate(images[:-1]))
        assert np.array_equal(data.test_images.reshape(4, -1), images[-1])


def test_missing_or_odd_cifar_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no path was given: cifar10 needs --data-path"):
        load("cifar10")
    with pytest.raises(ValueError, match=r"there is none in .*cifar-100-python\.tar\.gz"):
        load("cifar100", tmp_path)
    write_tree(tmp_path / "few", 9)
    with pytest.raises(ValueError, match="has 9 classes of 32 x 32 pixels; cifar10 has 10"):
        load("cifar10", tmp_path / "few")
    write_tree(tmp_path / "small", 10, size=28)
    with pytest.raises(ValueError, match="has 10 classes of 28 x 28 pixels"):
        load("cifar10", tmp_path / "small")
    with pytest.raises(ValueError, match="unknown data 'svhn'; choose from digits"):
        load("svhn")
    with pytest.raises(ValueError, match="digits come with scikit-learn"):
        load("digits", tmp_path)
