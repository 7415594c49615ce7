"""Data is read as it lies in its files, and fed the same however it is loaded."""

from __future__ import annotations

import doctest
import gc
import gzip
import hashlib
import importlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import decentlam
from decentlam.lab.data import DATASETS, Batches, feed, load, split
from decentlam.lab.data.cifar import PICKLES
from decentlam.lab.data.fashion_mnist import DEFAULT_PATH, read_idx
from decentlam.lab.data.memory import InMemory, crop_and_flip
from decentlam.lab.models import make_model

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
    return InMemory(
        "made", classes, images, labels, images[:9], labels[:9], mean, std, crop_and_flip
    )


def plain(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalized the textbook way, from (N, H, W, C) bytes, in float64."""
    return torch.from_numpy((images / 255 - np.array(mean)) / np.array(std)).permute(0, 3, 1, 2)


# Digits and Fashion-MNIST


def test_digits_are_scikit_learns_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data, again = load("digits"), load("digits")
    assert (data.classes, data.shape, len(data.labels), data.num_test) == (10, (1, 8, 8), 1437, 360)
    assert torch.equal(data.images, again.images) and torch.equal(data.labels, again.labels)
    pixels, targets = load_digits(return_X_y=True)
    images = torch.cat([data.images, data.test_images]).view(-1, 64)
    labels = torch.cat([data.labels, data.test_labels])
    ours = Counter(
        (*row, label) for row, label in zip(images.tolist(), labels.tolist(), strict=True)
    )
    theirs = zip(pixels.astype(int).tolist(), targets.tolist(), strict=True)
    assert ours == Counter((*row, label) for row, label in theirs)
    assert all(35 <= n <= 37 for n in data.test_labels.bincount())  # in proportion


def test_digits_have_mean_0_and_deviation_1():
    data = load("digits")
    inputs, labels = data.train_batch(torch.arange(1437), seeded(0))
    assert inputs.dtype == torch.float32 and torch.equal(labels, data.labels)
    assert inputs.mean().item() == pytest.approx(0, abs=1e-4)
    assert inputs.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_four_nodes_learn_the_digits_together():
    data = load("digits")
    batches = Batches(split(data.labels, 4, "label-sorted", seed=0), 32, seed=0)
    model = make_model("mlp", data.shape, data.classes, seed=0)
    nodes = decentlam.SimulatedModule(model, "decentlam", "ring", 4, lr=0.1, momentum=0.9)
    for inputs, labels in feed(data, batches, range(4), 0, 60):
        nodes.step(F.cross_entropy, inputs, labels)
    averaged = nodes.averaged()
    with torch.no_grad():
        right = sum((averaged(x).argmax(1) == y).sum().item() for x, y in data.test_batches(100))
    assert right > 0.85 * data.num_test


def fashion_mnist_files() -> Path:
    if not (DEFAULT_PATH / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip(f"no Fashion-MNIST in {DEFAULT_PATH}: apt-get install dataset-fashion-mnist")
    return DEFAULT_PATH


def test_fashion_mnist_is_what_its_files_say():
    folder = fashion_mnist_files()
    data = load("fashion-mnist")
    raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    assert data.images.numpy().tobytes() == raw
    assert data.labels.bincount().tolist() == [6000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    assert (data.shape, data.num_test) == ((1, 28, 28), 10_000)
    pixels = data.images.double() / 255
    assert pixels.mean().item() == pytest.approx(data.mean[0], abs=5e-5)
    assert pixels.std().item() == pytest.approx(data.std[0], abs=5e-5)


def test_fashion_mnist_is_found_in_torchvisions_layout(tmp_path: Path):
    (tmp_path / "FashionMNIST").mkdir()
    (tmp_path / "FashionMNIST" / "raw").symlink_to(fashion_mnist_files())
    assert len(load("fashion-mnist", tmp_path).labels) == 60_000


def test_missing_fashion_mnist_says_how_to_get_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"apt-get install dataset-fashion-mnist.*--data-path"):
        load("fashion-mnist", tmp_path)


def idx(shape: tuple[int, ...], kind: int = 8) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return bytes([0, 0, kind, len(shape)]) + sizes + bytes(range(int(np.prod(shape))))


def pack(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # gzip would put the time into the name of the test


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_compressed_or_not(tmp_path: Path, ending: str):
    file = tmp_path / f"values{ending}"
    file.write_bytes(pack(idx((2, 3, 4))) if ending else idx((2, 3, 4)))
    assert torch.equal(read_idx(file, (2, 3, 4)), torch.arange(24).byte().view(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pack(idx((2, 3)))[:-12], "cannot be decompressed"),
        (b"<html>not found</html>", "cannot be decompressed"),
        (pack(b""), "starts with nothing instead of 00 00 08 02"),
        (pack(idx((2, 3), kind=13)), "starts with 00 00 0d 02"),
        (pack(idx((6,))), "starts with 00 00 08 01"),
        (pack(idx((3, 3))), r"array of \(3, 3\); Fashion-MNIST has \(2, 3\)"),
        (pack(idx((2, 3))[:-1]), "has 5 values after its header, which says 6"),
        (pack(idx((2, 3)) + b"x"), "has 7 values"),
    ],
)
def test_wrong_or_truncated_idx_files_are_refused(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "values.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "values.gz", (2, 3))


def test_labels_out_of_range_are_refused():
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="test labels go from 0 to 3; 2 classes have labels 0 to"):
        InMemory("made", 2, images, good, images, bad, (0.0,), (1.0,))
    with pytest.raises(ValueError, match="training set has 1 images and 2 labels"):
        InMemory("made", 2, images[:1], good, images, good, (0.0,), (1.0,))


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
    root = tmp_path_factory.mktemp("imagenet")
    sizes = {"n01": (300, 260), "n02": (200, 400), "n03": (64, 64)}
    for name, (height, width) in sizes.items():
        for part in ("train", "val"):
            (root / part / name).mkdir(parents=True)
            for k, mode in enumerate(("RGB", "L", "RGBA")):
                image = Image.fromarray(random_images(1, height, width, 3, seed=k)[0])
                image.convert(mode).save(root / part / name / f"{k}.png")
    return root


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


# Batches and the feed


@pytest.mark.parametrize("batch", [1, 3, 8, 20, 50])
def test_each_pass_takes_every_sample_of_a_shard_once(batch: int):
    shards = [torch.arange(0, 20), torch.arange(20, 33), torch.arange(33, 34)]
    batches = Batches(shards, batch, seed=5)
    for node, shard in enumerate(shards):
        taken = [batches.indices(step, node) for step in range(60)]
        assert all(len(part) == batch for part in taken)
        passes = torch.cat(taken).split(len(shard))
        whole = [part.sort().values for part in passes if len(part) == len(shard)]
        assert all(torch.equal(part, shard) for part in whole)
        if len(shard) > 5 and len(whole) > 1:
            assert not torch.equal(passes[0], passes[1])


def test_any_step_can_be_asked_for_in_any_order():
    shards = split(torch.arange(100) % 10, 4, "iid", seed=0)
    onward = Batches(shards, 8, seed=1)
    expected = {(k, i): onward.indices(k, i) for k in range(20) for i in range(4)}
    backward = Batches(shards, 8, seed=1)
    for (k, i), indices in reversed(expected.items()):
        assert torch.equal(backward.indices(k, i), indices)
        assert onward.generator(k, i).initial_seed() == backward.generator(k, i).initial_seed()


def test_nodes_steps_and_seeds_have_random_numbers_of_their_own():
    shards = [torch.arange(50)] * 3
    seeds = {
        Batches(shards, 2, seed).generator(step, node).initial_seed()
        for seed in range(4)
        for step in range(10)
        for node in range(3)
    }
    assert len(seeds) == 120
    firsts = {
        tuple(Batches(shards, 50, s).indices(0, i).tolist()) for s in (0, 1) for i in range(3)
    }
    assert len(firsts) == 6


@pytest.mark.parametrize(
    ("count", "nodes", "batch", "steps"), [(60_000, 8, 128, 58), (64, 4, 16, 1), (10, 4, 16, 1)]
)
def test_an_epoch_is_as_many_samples_as_there_are(count: int, nodes: int, batch: int, steps: int):
    shards = split(torch.zeros(count, dtype=torch.int64), nodes, "iid", seed=0)
    assert Batches(shards, batch, seed=0).steps_per_epoch == steps


def test_bad_batches_and_feeds_are_refused():
    shards = [torch.arange(4), torch.arange(4, 8)]
    with pytest.raises(ValueError, match=r"nodes without any: \[1\]"):
        Batches([torch.arange(4), torch.arange(0)], 2, seed=0)
    with pytest.raises(
        ValueError, match="batch_per_node must be a whole number of 1 or more, got 0"
    ):
        Batches(shards, 0, seed=0)
    with pytest.raises(ValueError, match="seed must be a whole number of 0 or more, got -1"):
        Batches(shards, 1, seed=-1)
    batches = Batches(shards, 2, seed=0)
    with pytest.raises(ValueError, match="nodes from 0 to 1; there is no step 0 of node 2"):
        batches.indices(0, 2)
    with pytest.raises(ValueError, match=r"some of 0 to 1, got \[2\]"):
        feed(in_memory(), batches, [2], 0, 1)
    with pytest.raises(ValueError, match="from 3 up to 2"):
        feed(in_memory(), batches, [0], 3, 2)
    with pytest.raises(ValueError, match="workers must be a whole number of 0 or more, got -1"):
        feed(in_memory(), batches, [0], 0, 1, workers=-1)


def test_the_feed_is_the_batches_of_each_node_stacked():
    data = in_memory()
    batches = Batches(split(data.labels, 3, "iid", seed=0), 4, seed=0)
    steps = list(feed(data, batches, [2, 0], 5, 8))
    assert len(steps) == 3
    for step, (inputs, labels) in enumerate(steps, start=5):
        assert inputs.shape == (2, 4, 3, 8, 8) and labels.shape == (2, 4)
        for row, node in enumerate([2, 0]):
            indices = batches.indices(step, node)
            expected = data.train_batch(indices, batches.generator(step, node))
            assert torch.equal(inputs[row], expected[0])
            assert torch.equal(labels[row], data.labels[indices])
    (alone, _), *_ = feed(data, batches, [0], 5, 6)
    assert torch.equal(alone[0], steps[0][0][1])
    assert list(feed(data, batches, [0], 5, 5)) == []


@forks
@pytest.mark.parametrize("kind", ["in memory", "folder"])
def test_workers_give_the_same_values_and_leave_the_global_generator_alone(kind: str, image_folder):
    data = in_memory() if kind == "in memory" else load("imagenet", image_folder)
    batches = Batches(split(data.labels, 2, "iid", seed=0), 3, seed=0)
    before = torch.get_rng_state()
    here = list(feed(data, batches, [0, 1], 2, 6))
    ahead = list(feed(data, batches, [0, 1], 2, 6, workers=WORKERS))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(here) == len(ahead) == 4
    for (x, y), (same_x, same_y) in zip(here, ahead, strict=True):
        assert torch.equal(x, same_x) and torch.equal(y, same_y)


@forks
@pytest.mark.parametrize("how", ["closed", "dropped", "used up"])
def test_workers_stop_with_the_feed(how: str):
    data = in_memory()
    batches = Batches(split(data.labels, 2, "iid", seed=0), 3, seed=0)
    steps = feed(data, batches, [0], 0, 5, workers=WORKERS)
    next(steps)
    assert len(multiprocessing.active_children()) == WORKERS
    if how == "closed":
        steps.close()
    elif how == "dropped":
        del steps
        gc.collect()
    else:
        assert len(list(steps)) == 4
    assert multiprocessing.active_children() == []


@forks
def test_a_failure_in_a_worker_reaches_the_training_and_stops_the_workers(tmp_path: Path):
    for part in ("train", "val"):
        (tmp_path / part / "n01").mkdir(parents=True)
        (tmp_path / part / "n01" / "broken.png").write_bytes(b"no image")
    batches = Batches([torch.arange(1)], 1, seed=0)
    with pytest.raises(ValueError, match=r"broken\.png is not an image"):
        next(feed(load("imagenet", tmp_path), batches, [0], 0, 5, workers=1))
    assert multiprocessing.active_children() == []


def test_the_lab_imports_torchvision_and_scikit_learn_when_data_is_loaded():
    code = """
import sys, decentlam.lab.data, decentlam.lab.models, decentlam.lab.schedules
print(sorted({"torchvision", "sklearn", "PIL", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert list(DATASETS) == ["digits", "fashion-mnist", "cifar10", "cifar100", "imagenet"]


@pytest.mark.parametrize("name", ["data.batches", "data.shards", "models", "schedules"])
def test_examples_in_docstrings_print_what_they_say(name: str):
    done = doctest.testmod(importlib.import_module(f"decentlam.lab.{name}"))
    assert done.attempted and not done.failed
