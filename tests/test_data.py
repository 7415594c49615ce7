"""Digits and Fashion-MNIST are read as they lie in their files."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from images import seeded

import decentlam
from decentlam.lab.data import Batches, feed, load, split
from decentlam.lab.data.fashion_mnist import DEFAULT_PATH, read_idx
from decentlam.lab.data.memory import InMemory
from decentlam.lab.models import make_model


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
    for step in feed(data, batches, range(4), 0, 60):
        inputs, labels = (torch.stack(parts) for parts in zip(*step, strict=True))
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
