"""Average precision by pycocotools, on cases by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decentlam.lab.detection.annotations import AnnotatedImage
from decentlam.lab.detection.scores import Detections, score

NAMES = {1: "cat", 2: "dog", 5: "cow"}


def image(*boxes: tuple[int, list[float], bool]) -> AnnotatedImage:
    """An image of 200 x 200 with (label, corners, ignored)."""
    corners = np.array([box for _, box, _ in boxes], dtype=float).reshape(-1, 4)
    return AnnotatedImage(
        Path("x.jpg"),
        200,
        200,
        corners,
        np.array([label for label, _, _ in boxes], dtype=np.int64),
        np.array([ignored for _, _, ignored in boxes], dtype=bool),
        (corners[:, 2:] - corners[:, :2]).prod(1),
    )


def detections(at: int, *boxes: tuple[int, list[float], float]) -> Detections:
    """(label, corners, score)."""
    return at, [[*map(float, box), float(label), float(value)] for label, box, value in boxes]


TRUTH = [
    image((1, [10, 10, 60, 60], False), (2, [100, 100, 120, 120], False)),  # medium and small
    image((1, [0, 0, 150, 150], True), (1, [160, 160, 190, 190], False)),  # a crowd, a small one
    image(),
]


def test_scores_by_hand(capsys):
    seen = [
        detections(0, (1, [10, 10, 60, 60], 0.9), (2, [100, 100, 120, 112], 0.8)),  # whole, 60 %
        # In a crowd, which counts neither way; then what is wrong, below all that is right.
        detections(1, (1, [20, 20, 90, 90], 0.95), (1, [160, 160, 190, 190], 0.7)),
        detections(2, (2, [5, 5, 50, 50], 0.1)),
    ]
    found = score(TRUTH, NAMES, seen)
    assert capsys.readouterr().out == ""  # pycocotools prints as it goes
    assert found["ap50"] == pytest.approx(1)
    assert found["ap75"] == pytest.approx(0.5)  # class 1 whole, class 2 not at all
    assert found["ap"] == pytest.approx((1 + 0.3) / 2)  # class 2 at overlaps of 0.5, 0.55 and 0.6
    assert found["ap_medium"] == pytest.approx(1) and found["ap_large"] is None
    assert score(TRUTH, NAMES, seen[::-1]) == found  # nodes report in any order
    nothing = score(TRUTH, NAMES, [detections(k) for k in range(3)])
    assert {value for value in nothing.values() if value is not None} == {0}
    for wrong in (seen[:-1], [*seen, seen[0]]):  # every image counts once
        with pytest.raises(AssertionError, match="3 test images"):
            score(TRUTH, NAMES, wrong)
