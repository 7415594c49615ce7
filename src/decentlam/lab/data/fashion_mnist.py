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
    folder = next((f for f in folders if (f / "train-labels-idx1-ubyte.gz").is_file()), None)
    if folder is None:
        raise ValueError(f"there is no Fashion-MNIST in {root}. {HOW_TO_GET}")
    train, test = _read(folder, "train", 60_000), _read(folder, "t10k", 10_000)
    return InMemory(10, *train, *test, MEAN, STD)


def _read(folder: Path, part: str, count: int) -> tuple[Tensor, Tensor]:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", (count, 28, 28))
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", (count,))
    return images.unsqueeze(1), labels.long()


def read_idx(file: Path, shape: tuple[int, ...]) -> Tensor:
    """Read the bytes of a compressed idx file, which must be of the given shape.

    The format: 0, 0, 8 for bytes, the number of dimensions; each dimension in 4 bytes, highest
    first; then the values.
    """
    head = bytes([0, 0, 8, len(shape), *np.array(shape, ">u4").tobytes()])
    try:
        content = gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read ({error}); get it anew. {HOW_TO_GET}") from error
    if not content.startswith(head) or len(content) - len(head) != np.prod(shape):
        raise ValueError(f"{file} is not an idx file of {shape} bytes; get it anew. {HOW_TO_GET}")
    values = np.frombuffer(content, np.uint8, offset=len(head))
    return torch.from_numpy(values.reshape(shape).copy())
