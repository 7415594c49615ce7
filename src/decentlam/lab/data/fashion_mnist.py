"""Fashion-MNIST from its four idx files: 70,000 grey images of 28 x 28."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.data.memory import InMemory

DEFAULT_PATH = Path("/usr/share/datasets/fashion-mnist")
MEAN, STD = (0.2860,), (0.3530,)
HOW_TO_GET = (
    f"On Debian and Ubuntu, apt-get install dataset-fashion-mnist puts it into {DEFAULT_PATH}, "
    "where it is looked for; otherwise give --data-path, a folder with the four *-ubyte.gz files "
    "or the folder that torchvision.datasets.FashionMNIST was given as its root"
)


def fashion_mnist(path: str | Path | None = None) -> InMemory:
    root = DEFAULT_PATH if path is None else Path(path)
    folders = [root, root / "FashionMNIST" / "raw", root / "raw"]
    folder = next((f for f in folders if _find(f, "train-labels-idx1-ubyte")), None)
    if folder is None:
        raise ValueError(f"there is no Fashion-MNIST in {root}. {HOW_TO_GET}")
    train, labels = read_pair(folder, "train", 60_000)
    test, test_labels = read_pair(folder, "t10k", 10_000)
    return InMemory("fashion-mnist", 10, train, labels, test, test_labels, MEAN, STD)


def read_pair(folder: Path, prefix: str, count: int) -> tuple[Tensor, Tensor]:
    """Read images (count, 1, 28, 28), uint8, and labels (count,), int64."""
    images = read_idx(folder, f"{prefix}-images-idx3-ubyte", (count, 28, 28))
    return images.unsqueeze(1), read_idx(folder, f"{prefix}-labels-idx1-ubyte", (count,)).long()


def read_idx(folder: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """Read the bytes of an idx file, compressed or not, which must be of the given shape.

    The format: 0, 0, 8 for bytes, the number of dimensions; each dimension in 4 bytes, highest
    first; then the values.
    """
    file = _find(folder, name)
    if file is None:
        raise ValueError(f"there is no {name}.gz in {folder}. {HOW_TO_GET}")
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be decompressed ({error}); get it anew") from error
    head = bytes([0, 0, 8, len(shape), *np.array(shape, ">u4").tobytes()])
    if not content.startswith(head) or len(content) - len(head) != np.prod(shape):
        raise ValueError(f"{file} is not an idx file of {shape} bytes; get it anew")
    values = np.frombuffer(content, np.uint8, offset=len(head))
    return torch.from_numpy(values.reshape(shape).copy())


def _find(folder: Path, name: str) -> Path | None:
    files = (folder / f"{name}.gz", folder / name)
    return next((file for file in files if file.is_file()), None)
