"""Scores of a classifier, and statistics of batch norm estimated for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decentlam.lab.data import load
from decentlam.lab.train import classification
from decentlam.lab.train.tasks import Numerics

FLOAT64 = Numerics("float64", torch.device("cpu"))


def test_scores_are_counted_by_hand():
    """Three classes, so top-5 is everything; of four samples two are right."""
    outputs = torch.tensor([[2.0, 1.0, 0.0]] * 4, dtype=torch.float64)
    model = torch.nn.Identity()
    loss, top1, top5, samples = classification.score(
        model, (outputs, torch.tensor([0, 0, 1, 2])), FLOAT64
    )
    assert (top1, top5, samples) == (2, 4, 4)
    lost = np.log(np.exp([2.0, 1.0, 0.0]).sum()) - np.array([2.0, 2.0, 1.0, 0.0])
    assert loss == pytest.approx(lost.sum(), rel=1e-12)


def test_estimated_statistics_are_those_of_training_samples():
    """One batch norm on the pixels: its statistics are theirs, but for a smaller last batch."""
    data = load("digits")
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(1, momentum=0.3), torch.nn.Dropout()).double()
    state = torch.get_rng_state()
    classification.estimate_batch_norm(model, data, FLOAT64, seed=0)
    pixels, _ = data.train_batch(torch.arange(len(data.labels)), torch.Generator())
    assert model[0].running_mean.item() == pytest.approx(pixels.mean().item(), abs=5e-3)
    assert model[0].running_var.item() == pytest.approx(pixels.var().item(), rel=5e-3)
    assert model[0].momentum == 0.3 and not model.training
    assert torch.equal(torch.get_rng_state(), state)
