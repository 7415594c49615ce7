"""Average precision beside pycocotools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

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


def random_case(seed: int, images: int = 12) -> tuple[list[AnnotatedImage], list[Detections]]:
    """Objects of all sizes, some crowds, and detections near and far from them."""
    draw = np.random.default_rng(seed)
    truth, seen = [], []
    for at in range(images):
        low = draw.uniform(0, 80, (6, 2))
        boxes = np.concatenate([low, low + draw.uniform(6, 110, (6, 2))], 1)
        labels = draw.choice([1, 2], 6)
        count = 0 if at == 3 else 6  # an image without objects
        truth.append(
            image(*zip(labels[:count], boxes.tolist()[:count], draw.random(6) < 0.15, strict=False))
        )
        near = np.concatenate([boxes + draw.normal(0, 4, (6, 4)), boxes[:3] + 30])
        near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 1)
        guessed = np.where(draw.random(9) < 0.8, np.append(labels, labels[:3]), 2)
        seen.append(detections(at, *zip(guessed, near.tolist(), draw.random(9), strict=True)))
    return truth, seen


def test_coco_scores_equal_those_of_pycocotools_on_files(tmp_path: Path, capsys):
    truth, seen = random_case(seed=0)
    entries = [
        {"image_id": at, "category_id": int(label), "area": float(area), "iscrowd": int(crowd)}
        | {"bbox": [x1, y1, x2 - x1, y2 - y1]}
        for at, one in enumerate(truth)
        for (x1, y1, x2, y2), label, area, crowd in zip(
            one.boxes.tolist(), one.labels, one.areas, one.ignored, strict=True
        )
    ]
    listed = {
        "images": [{"id": at} for at in range(len(truth))],
        "categories": [{"id": label, "name": name} for label, name in NAMES.items()],
        "annotations": [entry | {"id": k} for k, entry in enumerate(entries, start=1)],
    }
    results = [
        {"image_id": at, "category_id": int(label), "score": value}
        | {"bbox": [x1, y1, x2 - x1, y2 - y1]}
        for at, rows in seen
        for x1, y1, x2, y2, label, value in rows
    ]
    (tmp_path / "truth.json").write_text(json.dumps(listed))
    (tmp_path / "results.json").write_text(json.dumps(results))
    known = COCO(str(tmp_path / "truth.json"))
    evaluation = COCOeval(known, known.loadRes(str(tmp_path / "results.json")), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    capsys.readouterr()
    ours = score(truth, NAMES, seen)
    assert capsys.readouterr().out == ""
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
    for name, expected in zip(names, evaluation.stats, strict=False):
        assert ours[name] == pytest.approx(expected, abs=1e-12)
        assert 0 < expected < 1


def test_no_detections_score_zero():
    truth, _ = random_case(2)
    assert set(score(truth, NAMES, [detections(at) for at in range(12)]).values()) == {0}


def test_every_image_counts_once_in_any_order():
    truth, seen = random_case(3)
    assert score(truth, NAMES, seen[::-1]) == score(truth, NAMES, seen)
    for wrong in (seen[:-1], [*seen, seen[0]]):
        with pytest.raises(AssertionError, match="12 test images"):
            score(truth, NAMES, wrong)
