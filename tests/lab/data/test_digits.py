"""The digits are scikit-learn's, split once and for all."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import decentlam
from decentlam.lab.data import Batches, load, load_batches, split
from decentlam.lab.models import make_model
from tests.lab.data.images import seeded


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
    for step in load_batches(data, batches, range(4), 0, 60):
        inputs, labels = (torch.stack(parts) for parts in zip(*step, strict=True))
        nodes.step(F.cross_entropy, inputs, labels)
    averaged = nodes.averaged()
    with torch.no_grad():
        right = sum((averaged(x).argmax(1) == y).sum().item() for x, y in data.test_batches(100))
    assert right > 0.85 * data.num_test
