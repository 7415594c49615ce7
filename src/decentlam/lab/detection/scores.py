"""A detector's detections on the test images, and COCO's scores of them by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from decentlam.lab.detection.annotations import AnnotatedImage

MAIN = "ap50"
_COCO = ("ap", MAIN, "ap75", "ap_small", "ap_medium", "ap_large")  # in the order of COCOeval.stats

Scores = dict[str, float | None]
# An index of the test set, and what was detected there: x1, y1, x2, y2 in the image's own pixels,
# label and score. Plain values, which processes can send each other.
Detections = tuple[int, list[list[float]]]


def from_output(image: int, output: dict[str, Tensor], scale: tuple[float, float]) -> Detections:
    """Convert the output of a torchvision detector to the pixels of the image before resizing."""
    boxes = output["boxes"].double().cpu().numpy() / np.array([*scale, *scale])
    labels, scores = (output[key].double().cpu().numpy() for key in ("labels", "scores"))
    rows = np.column_stack([boxes, labels, scores])
    return image, rows[labels > 0].tolist()  # RetinaNet has a place for the background, too


def score(
    images: Sequence[AnnotatedImage], names: Mapping[int, str], detections: Iterable[Detections]
) -> Scores:
    """Score detections from 0 to 1; None where no object is of the size in question.

    VOC's difficult objects are given to COCO's program as crowds: they are neither learned nor
    missed. Every image must be there once: one that two nodes looked at would count twice.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    found = sorted(detections, key=lambda one: one[0])
    indices = [image for image, _ in found]
    assert indices == list(range(len(images))), f"{len(images)} test images, but {indices}"
    truth = [
        _entry(at, label, *box) | {"area": float(area), "iscrowd": int(ignored)}
        for at, image in enumerate(images)
        for box, label, area, ignored in zip(
            image.boxes.tolist(), image.labels, image.areas, image.ignored, strict=True
        )
    ]
    seen = [
        _entry(at, label, x1, y1, x2, y2) | {"score": value, "iscrowd": 0}
        for at, rows in found
        for x1, y1, x2, y2, label, value in rows
    ]
    for entry in seen:
        entry["area"] = entry["bbox"][2] * entry["bbox"][3]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        known: list[Any] = []
        for entries in (truth, seen):
            known.append(COCO())
            known[-1].dataset = {
                "images": [{"id": at + 1} for at in range(len(images))],
                "categories": [{"id": label, "name": name} for label, name in names.items()],
                "annotations": [{"id": k, **entry} for k, entry in enumerate(entries, start=1)],
            }
            known[-1].createIndex()
        evaluation = COCOeval(*known, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    stats = map(float, evaluation.stats)  # -1 where there is nothing to measure
    return {name: value if value >= 0 else None for name, value in zip(_COCO, stats, strict=False)}


def _entry(image: int, label: float, x1: float, y1: float, x2: float, y2: float) -> dict[str, Any]:
    bbox = [x1, y1, x2 - x1, y2 - y1]
    return {"image_id": image + 1, "category_id": int(label), "bbox": bbox}
