"""The digits are scikit-learn's, split once and for all."""

from __future__ import annotations

import numpy as np
import torch

from decentlam.lab.data import load


def test_digits_are_scikit_learns_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data, again = load("digits"), load("digits")
    assert (data.classes, data.shape, len(data.labels), data.num_test) == (10, (1, 8, 8), 1437, 360)
    assert torch.equal(data.images, again.images) and torch.equal(data.labels, again.labels)
    pixels, targets = load_digits(return_X_y=True)
    images = torch.cat([data.images, data.test_images]).view(-1, 64)
    labels = torch.cat([data.labels, data.test_labels])
    theirs = np.column_stack([pixels, targets])
    assert sorted(torch.column_stack([images, labels]).tolist()) == sorted(theirs.tolist())
    assert all(35 <= n <= 37 for n in data.test_labels.bincount())  # in proportion
