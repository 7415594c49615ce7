"""The handwritten digits that come with scikit-learn: 1,797 grey images of 8 x 8."""

from __future__ import annotations

from pathlib import Path

import torch

from decentlam.lab.data.memory import InMemory

NUM_TEST = 360  # 1,437 are left for training
SPLIT_SEED = 0
MEAN, STD = 4.8861, 6.0179  # of the training pixels, which are whole numbers from 0 to 16


def digits(path: str | Path | None = None) -> InMemory:
    """Return the digits in a fixed, stratified split; there is no path to read from."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if path is not None:
        raise ValueError(f"digits come with scikit-learn and have no path; leave out {str(path)!r}")
    pixels, targets = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.from_numpy(targets).long()
    train, test = train_test_split(
        torch.arange(len(labels)), test_size=NUM_TEST, stratify=labels, random_state=SPLIT_SEED
    )
    return InMemory(
        classes=10,
        images=images[train],
        labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        mean=(MEAN / 255,),
        std=(STD / 255,),
    )
