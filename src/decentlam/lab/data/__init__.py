"""Data sets of images and text, their shards, and the order of batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from decentlam.lab.data.batches import Batches, load_batches
from decentlam.lab.data.cifar import cifar10, cifar100
from decentlam.lab.data.digits import digits
from decentlam.lab.data.fashion_mnist import fashion_mnist
from decentlam.lab.data.imagenet import ImageFolders, imagenet
from decentlam.lab.data.memory import InMemory
from decentlam.lab.data.shards import split
from decentlam.lab.data.text import Text, shakespeare, stdlib, text

__all__ = ["DATASETS", "TEXTS", "Batches", "Data", "load", "load_batches", "split"]

Data: TypeAlias = InMemory | ImageFolders | Text
DATASETS: dict[str, Callable[[str | Path | None], Data]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "imagenet": imagenet,
}
TEXTS: dict[str, Callable[[str | Path | None], Data]] = {
    "stdlib": stdlib,
    "shakespeare": shakespeare,
    "text": text,
}


def load(name: str, path: str | Path | None = None) -> Data:
    """Load the data set of that name, from `path`, or from where it is usually found."""
    known = DATASETS | TEXTS
    if name not in known:
        raise ValueError(f"unknown data {name!r}; choose from {', '.join(known)}")
    return known[name](path)
