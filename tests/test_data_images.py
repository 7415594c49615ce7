"""CIFAR and ImageNet are read as they lie in their files, and augmented from one generator."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from images import WORKERS, forks, in_memory, plain, random_images, seeded, write_image_folder
from PIL import Image

from decentlam.lab.data import load
from decentlam.lab.data.cifar import PICKLES
from decentlam.lab.data.memory import crop_and_flip

# CIFAR


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


def test_cifar10_is_read_from_six_sheets(tmp_path: Path):
    rows = np.arange(10_000)
    sheet = np.zeros((10_000, 1024, 3), dtype=np.uint8)
    sheet[rows, rows % 1024, rows % 3] = rows % 255 + 1  # one bright pixel per image
    Image.fromarray(sheet).save(tmp_path / "test_batch.png", compress_level=1)
    for k in range(1, 6):
        (tmp_path / f"data_batch_{k}.png").symlink_to(tmp_path / "test_batch.png")
    labels = [k % 10 for k in range(50_000)]
    (tmp_path / "train_lables.json").write_text(json.dumps(labels))
    (tmp_path / "test_lables.json").write_text(json.dumps(labels[:10_000]))
    data = load("cifar10", tmp_path)
    assert data.labels.tolist() == labels and data.num_test == 10_000
    assert data.images.shape == (50_000, 3, 32, 32)
    picked = data.images[20_000:30_000][rows, rows % 3, rows % 1024 // 32, rows % 32]
    assert picked.tolist() == (rows % 255 + 1).tolist()
    assert data.images.count_nonzero() == 50_000

    (tmp_path / "data_batch_1.png").unlink()
    (tmp_path / "data_batch_1.png").write_bytes((tmp_path / "test_batch.png").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"data_batch_1\.png is not a sheet of CIFAR-10"):
        load("cifar10", tmp_path)
    (tmp_path / "test_lables.json").write_text(json.dumps(labels[:9_999]))
    with pytest.raises(ValueError, match=r"test_lables\.json has \(9999,\)"):
        load("cifar10", tmp_path)


def test_missing_or_odd_cifar_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no path was given: cifar10 needs --data-path.*sheets"):
        load("cifar10")
    with pytest.raises(ValueError, match=r"there is none in .*cifar-100-python\.tar\.gz"):
        load("cifar100", tmp_path)
    write_tree(tmp_path / "few", 9)
    with pytest.raises(ValueError, match="has 9 folders; cifar10 has 10 classes"):
        load("cifar10", tmp_path / "few")
    write_tree(tmp_path / "small", 10, size=28)
    with pytest.raises(ValueError, match="is 28 x 28, not 32 x 32"):
        load("cifar10", tmp_path / "small")
    with pytest.raises(ValueError, match="unknown data 'svhn'; choose from digits"):
        load("svhn")
    with pytest.raises(ValueError, match="digits come with scikit-learn"):
        load("digits", tmp_path)


@pytest.mark.parametrize("classes", [10, 100])
def test_real_cifar_has_the_published_statistics(classes: int):
    path = os.environ.get(f"DECENTLAM_CIFAR{classes}")
    if path is None:
        pytest.skip(f"set DECENTLAM_CIFAR{classes} to the folder that CIFAR-{classes} is in")
    data = load(f"cifar{classes}", path)
    assert data.labels.bincount().tolist() == [50_000 // classes] * classes
    assert data.test_labels.bincount().tolist() == [10_000 // classes] * classes
    pixels = data.images.double().div_(255)
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(data.mean, abs=1e-4)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(data.std, abs=1e-4)


def test_augmented_images_are_padded_crops_half_of_them_mirrored():
    images = torch.from_numpy(random_images(1, 3, 8, 8)).expand(2000, -1, -1, -1)
    padded = F.pad(images[0], (4, 4, 4, 4))
    expected = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 8, left : left + 8]
            expected[crop.numpy().tobytes()] = False
            expected[crop.flip(2).numpy().tobytes()] = True
    found = Counter(image.numpy().tobytes() for image in crop_and_flip(images, seeded(0)))
    assert len(expected) == 162 and found.keys() == expected.keys()
    mirrored = sum(count for image, count in found.items() if expected[image])
    assert abs(mirrored - 1000) < 5 * 500**0.5  # five standard deviations


def test_augmentation_is_drawn_from_the_given_generator_only():
    data, picked = in_memory(), torch.tensor([3, 3, 7])
    before = torch.get_rng_state()
    first, again, other = (data.train_batch(picked, seeded(s))[0] for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_test_batches_are_in_order_and_never_augmented():
    data = in_memory()
    parts = list(data.test_batches(4))
    assert [len(y) for _, y in parts] == [4, 4, 1]
    images = data.test_images.permute(0, 2, 3, 1).numpy()
    expected = plain(images, data.mean, data.std).float()
    torch.testing.assert_close(torch.cat([x for x, _ in parts]), expected)
    with pytest.raises(ValueError, match="1 image or more, got 0"):
        data.test_batches(0)


# ImageNet

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


def test_odd_image_folders_are_refused(image_folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="no path was given: imagenet needs --data-path"):
        load("imagenet")
    with pytest.raises(ValueError, match=r"train/CLASS/\*\.JPEG and val/CLASS"):
        load("imagenet", tmp_path)
    (tmp_path / "train" / "n01").mkdir(parents=True)
    (tmp_path / "train" / "n01" / "broken.png").write_bytes(b"no image")
    (tmp_path / "val").symlink_to(image_folder / "val")
    with pytest.raises(ValueError, match=r"different classes, such as \['n02', 'n03'\]"):
        load("imagenet", tmp_path)
    (tmp_path / "val").unlink()
    (tmp_path / "val").symlink_to(tmp_path / "train")
    with pytest.raises(ValueError, match=r"broken\.png is not an image that can be read"):
        load("imagenet", tmp_path).train_batch(torch.tensor([0]), seeded(0))
