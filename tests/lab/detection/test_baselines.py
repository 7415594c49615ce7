"""Detectors that never look."""

from __future__ import annotations

import pytest

from decentlam.lab.detection.baselines import commonest_boxes
from decentlam.lab.detection.scores import score
from tests.lab.detection.test_scores import NAMES, image


def test_commonest_boxes_are_those_that_most_images_have():
    always, rare = [20, 20, 60, 60], [100, 100, 180, 180]
    train = [image((1, always, False)) for _ in range(9)] + [image((2, rare, False))]
    guesses = commonest_boxes(train, [image(), image((1, always, False))])
    assert [at for at, _ in guesses] == [0, 1]
    for row, box, label, share in zip(
        guesses[0][1], (always, rare), (1, 2), (0.9, 0.1), strict=True
    ):
        assert row == pytest.approx([*box, label, share])
    assert score([image((1, always, False))], NAMES, guesses[:1])["ap50"] == pytest.approx(1)
