"""What a detector finds in the test images, and its scores: COCO's by pycocotools, and VOC's.

Average precision as PASCAL VOC measures it (Everingham et al., 2010), at an overlap of 1/2:
detections of a class are taken in order of their scores. One is right if it overlaps the object of
its class that it overlaps most by 1/2 or more, and that no earlier one has taken. Difficult objects
count neither way. Precision is then averaged over recall: over its whole range (since 2010) or at
eleven points (until 2009). Unlike VOC's own program, a box from 10 to 20 is 10 pixels wide here,
not 11.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from decentlam.lab.detection.annotations import AnnotatedImage

MAIN = "ap50"
OVERLAP = 0.5
_COCO = ("ap", MAIN, "ap75", "ap_small", "ap_medium", "ap_large")  # in the order of COCOeval.stats

Scores = dict[str, float | None]


@dataclass(frozen=True, eq=False)
class Detections:
    """Boxes in one test image, in its own pixels, with their labels and scores, best first."""

    image: int  # its place in the test set
    boxes: np.ndarray  # (k, 4) float64: x1, y1, x2, y2
    labels: np.ndarray  # (k,) int64
    scores: np.ndarray  # (k,) float64

    def plain(self) -> list[Any]:
        """Return lists and numbers, which processes can send each other."""
        return [int(self.image), self.boxes.tolist(), self.labels.tolist(), self.scores.tolist()]


def from_plain(image: int, boxes: list[Any], labels: list[Any], scores: list[Any]) -> Detections:
    """Return what `plain` described."""
    rows = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    values = np.array(labels, dtype=np.int64), np.array(scores, dtype=np.float64)
    return Detections(image, rows, *values)


def from_output(image: int, output: dict[str, Tensor], scale: tuple[float, float]) -> Detections:
    """Return what torchvision's detectors return for an image that was resized by `scale`."""
    boxes = output["boxes"].double().cpu().numpy() / np.array([*scale, *scale])
    labels = output["labels"].cpu().numpy()
    kept = labels > 0  # RetinaNet has a place for the background, too
    scores = output["scores"].double().cpu().numpy()
    return Detections(image, boxes[kept], labels[kept], scores[kept])


def ordered(parts: Iterable[Sequence[Detections]], images: int) -> list[Detections]:
    """Return the detections of several nodes in their shares of the test set, by image.

    Every image must be there once: one that two nodes looked at would count twice.
    """
    detections = sorted((one for part in parts for one in part), key=lambda one: one.image)
    seen = [one.image for one in detections]
    assert seen == list(range(images)), f"{images} test images, but {seen} were looked at"
    return detections


def score(
    images: Sequence[AnnotatedImage], names: Mapping[int, str], detections: Sequence[Detections]
) -> Scores:
    """Score detections from 0 to 1; None where no object is of the size in question."""
    stats = coco_stats(images, names, detections)
    scores: Scores = {
        name: value if value >= 0 else None for name, value in zip(_COCO, stats, strict=False)
    }
    scores["voc_ap50"] = mean_precision(images, detections)
    scores["voc_ap50_11"] = mean_precision(images, detections, eleven_points=True)
    return scores


# COCO --------------------------------------------------------------------------------------------


def coco_stats(
    images: Sequence[AnnotatedImage], names: Mapping[int, str], detections: Sequence[Detections]
) -> list[float]:
    """Return the twelve numbers that COCOeval prints; -1 where there is nothing to measure.

    VOC's difficult objects are given to it as crowds: they are neither learned nor missed.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = [
        _entry(at, box, label) | {"area": float(area), "iscrowd": int(ignored)}
        for at, image in enumerate(images)
        for box, label, area, ignored in zip(
            image.boxes, image.labels, image.areas, image.ignored, strict=True
        )
    ]
    seen = [
        _entry(one.image, box, label) | {"score": float(value), "iscrowd": 0}
        for one in detections
        for box, label, value in zip(one.boxes, one.labels, one.scores, strict=True)
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
    return [float(value) for value in evaluation.stats]


def _entry(image: int, box: Sequence[float], label: int) -> dict[str, Any]:
    x1, y1, x2, y2 = map(float, box)
    return {"image_id": image + 1, "category_id": int(label), "bbox": [x1, y1, x2 - x1, y2 - y1]}


# PASCAL VOC --------------------------------------------------------------------------------------


def mean_precision(
    images: Sequence[AnnotatedImage], detections: Sequence[Detections], eleven_points: bool = False
) -> float | None:
    """Return the mean over the classes that the images hold."""
    held = [image.labels[~image.ignored] for image in images]
    labels = sorted({int(label) for of_image in held for label in of_image})
    values = [precision_of(images, detections, label, eleven_points) for label in labels]
    return float(np.mean(values)) if values else None


def precision_of(
    images: Sequence[AnnotatedImage],
    detections: Sequence[Detections],
    label: int,
    eleven_points: bool = False,
) -> float:
    """Return the average precision of one class."""
    total = sum(int((~image.ignored[image.labels == label]).sum()) for image in images)
    marks = [mark for one in detections for mark in _marks(images[one.image], one, label)]
    marks.sort(key=lambda mark: -mark[0])
    right = np.array([is_right for _, is_right in marks], dtype=float)
    recall = np.cumsum(right) / total
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    if eleven_points:
        points = np.linspace(0, 1, 11)
        return float(np.mean([precision[recall >= r - 1e-12].max(initial=0.0) for r in points]))
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * envelope))


def _marks(image: AnnotatedImage, one: Detections, label: int) -> list[tuple[float, bool]]:
    """Return (score, whether it is right) of the detections that count."""
    boxes, ignored = image.boxes[image.labels == label], image.ignored[image.labels == label]
    taken = np.zeros(len(boxes), dtype=bool)
    chosen = np.flatnonzero(one.labels == label)
    marks = []
    for at in chosen[np.argsort(-one.scores[chosen], kind="stable")]:
        overlap = overlaps(one.boxes[at : at + 1], boxes)[0]
        best = int(overlap.argmax()) if len(boxes) else -1
        if best < 0 or overlap[best] < OVERLAP:
            marks.append((float(one.scores[at]), False))
        elif not ignored[best]:
            marks.append((float(one.scores[at]), not taken[best]))
            taken[best] = True
    return marks


def overlaps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return intersection over union of (a, 4) and (b, 4) boxes, (a, b)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return np.asarray(common / (areas[0][:, None] + areas[1][None] - common))
