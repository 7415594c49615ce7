"""Detectors that never look."""

from __future__ import annotations

import pytest

from decentlam.lab.detection.baselines import commonest_boxes
from decentlam.lab.detection.scores import (
    score,
)
from tests.lab.detection.test_scores import NAMES, image


def test_commonest_boxes_are_those_that_most_images_have():
    always, rare = [20, 20, 60, 60], [100, 100, 180, 180]
    train = [image((1, always, False)) for _ in range(9)] + [image((2, rare, False))]
    guesses = commonest_boxes(train, [image(), image((1, always, False))])
    assert [guess.image for guess in guesses] == [0, 1]
    assert guesses[0].boxes.tolist() == [always, rare]
    assert guesses[0].labels.tolist() == [1, 2]
    assert guesses[0].scores.tolist() == pytest.approx([0.9, 0.1])
    assert score([image((1, always, False))], NAMES, guesses[:1])["ap50"] == pytest.approx(1)
