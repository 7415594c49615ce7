"""Scores of a classifier."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decentlam.lab.train.tasks import Numerics, make_task
from tests.lab.helpers import recipe


def test_scores_are_counted_by_hand():
    """Three classes, so top-5 is everything; of four samples two are right."""
    outputs = torch.tensor([[2.0, 1.0, 0.0]] * 4, dtype=torch.float64)
    model = torch.nn.Identity()
    task = make_task(recipe(), Numerics("float64", torch.device("cpu")))
    loss, top1, top5, samples = task.score(model, (outputs, torch.tensor([0, 0, 1, 2])))
    assert (top1, top5, samples) == (2, 4, 4)
    lost = np.log(np.exp([2.0, 1.0, 0.0]).sum()) - np.array([2.0, 2.0, 1.0, 0.0])
    assert loss == pytest.approx(lost.sum(), rel=1e-12)
