"""Average precision, by hand and beside pycocotools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from decentlam.lab.detection.annotations import AnnotatedImage
from decentlam.lab.detection.scores import (
    Detections,
    mean_precision,
    ordered,
    overlaps,
    precision_of,
    score,
)

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
    return Detections(
        at,
        np.array([box for _, box, _ in boxes], dtype=float).reshape(-1, 4),
        np.array([label for label, _, _ in boxes], dtype=np.int64),
        np.array([value for _, _, value in boxes], dtype=float),
    )


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


@pytest.mark.parametrize("seed", [0, 1])
def test_coco_scores_equal_those_of_pycocotools_on_files(seed: int, tmp_path: Path, capsys):
    truth, seen = random_case(seed)
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
        {"image_id": one.image, "category_id": int(label), "score": float(value)}
        | {"bbox": [x1, y1, x2 - x1, y2 - y1]}
        for one in seen
        for (x1, y1, x2, y2), label, value in zip(
            one.boxes.tolist(), one.labels, one.scores, strict=True
        )
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


def test_voc_precision_by_hand():
    """Three objects; by falling score: found, missed by class, found twice, found.

    Precision 1, 1/2, 1/3, 1/2 at recall 1/3, 1/3, 1/3, 2/3: the envelope is 1 up to 1/3, then 1/2.
    Area: 1/3 + 1/6. Eleven points: 4 of them (0 to 0.3) at 1, 3 (0.4 to 0.6) at 1/2.
    """
    here, there, elsewhere = [0, 0, 10, 10], [20, 20, 40, 40], [100, 100, 150, 150]
    truth = [image((1, here, False), (1, there, False)), image((1, elsewhere, False))]
    seen = [
        detections(0, (1, here, 0.9), (1, [0, 0, 10, 9], 0.7), (1, there, 0.6)),
        detections(1, (1, [0, 0, 50, 50], 0.8)),
    ]
    assert precision_of(truth, seen, 1) == pytest.approx(1 / 2)
    assert precision_of(truth, seen, 1, eleven_points=True) == pytest.approx(5.5 / 11)


def test_difficult_objects_count_neither_way():
    box, hard = [0, 0, 10, 10], [50, 50, 90, 90]
    truth = [image((1, box, False), (1, hard, True))]
    assert precision_of(truth, [detections(0, (1, hard, 0.9), (1, box, 0.8))], 1) == 1
    assert precision_of(truth, [detections(0, (1, box, 0.8))], 1) == 1
    assert mean_precision([image((1, hard, True))], [detections(0)]) is None


def test_voc_precision_is_the_mean_precision_at_each_new_object():
    """Area of the envelope, against a sum over the objects found, one class at a time."""
    truth, seen = random_case(5)
    total = []
    for label in (1, 2):
        marks = []
        for one in seen:
            mine = [k for k in range(len(one.labels)) if one.labels[k] == label]
            taken: set[int] = set()
            objects = [
                (k, box)
                for k, box in enumerate(truth[one.image].boxes)
                if truth[one.image].labels[k] == label
            ]
            for k in sorted(mine, key=lambda k: -one.scores[k]):
                best = max(((iou(one.boxes[k], box), j) for j, box in objects), default=(0.0, -1))
                if best[0] >= 0.5 and truth[one.image].ignored[best[1]]:
                    continue
                right = best[0] >= 0.5 and best[1] not in taken
                taken |= {best[1]} if right else set()
                marks.append((one.scores[k], right))
        marks.sort(reverse=True)
        hits = [right for _, right in marks]
        count = sum(
            int(one.labels[k] == label and not one.ignored[k])
            for one in truth
            for k in range(len(one.labels))
        )
        at_hit = [sum(hits[: k + 1]) / (k + 1) for k in range(len(hits))]
        area = sum(max(at_hit[k:]) for k, right in enumerate(hits) if right) / count
        assert precision_of(truth, seen, label) == pytest.approx(area)
        total.append(area)
    assert mean_precision(truth, seen) == pytest.approx(sum(total) / 2)


def iou(one: np.ndarray, other: np.ndarray) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return float(common / (sum(areas) - common))


def test_overlaps_are_intersection_over_union():
    draw = np.random.default_rng(0)
    low = draw.uniform(0, 50, (2, 7, 2))
    one, other = np.concatenate([low, low + draw.uniform(1, 50, (2, 7, 2))], 2)
    expected = [[iou(a, b) for b in other] for a in one]
    assert np.allclose(overlaps(one, other), expected)


def test_perfect_detections_score_one_and_none_score_zero():
    truth, _ = random_case(2)
    truth = [image(*zip(t.labels, t.boxes.tolist(), [False] * 6, strict=False)) for t in truth]
    perfect = [
        detections(at, *((label, box, 0.9) for label, box in zip(t.labels, t.boxes, strict=True)))
        for at, t in enumerate(truth)
    ]
    best = score(truth, NAMES, perfect)
    worst = score(truth, NAMES, [detections(at) for at in range(12)])
    assert all(value == pytest.approx(1) for value in best.values())
    assert all(value == 0 for value in worst.values())


def test_shares_of_the_test_set_are_joined_without_duplicates():
    parts = [[detections(2), detections(0)], [detections(1)]]
    assert [one.image for one in ordered(parts, 3)] == [0, 1, 2]
    for wrong in ([*parts, [detections(1)]], parts[:1]):
        with pytest.raises(AssertionError, match="3 test images"):
            ordered(wrong, 3)
