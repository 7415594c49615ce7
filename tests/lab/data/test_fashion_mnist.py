"""Fashion-MNIST is read as it lies in its files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from decentlam.lab.data import load
from decentlam.lab.data.fashion_mnist import DEFAULT_PATH, read_idx


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pack(idx((2, 3)))[:-12], "cannot be read"),
        (b"<html>not found</html>", "cannot be read"),
        (pack(idx((2, 3), kind=13)), "is not an idx file of"),
        (pack(idx((3, 3))), "is not an idx file of"),
        (pack(idx((2, 3))[:-1]), "is not an idx file of"),
    ],
)
def test_wrong_or_truncated_idx_files_are_refused(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "values.gz"
    file.write_bytes(pack(idx((2, 3))))
    assert torch.equal(read_idx(file, (2, 3)), torch.arange(6).byte().view(2, 3))
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(file, (2, 3))
