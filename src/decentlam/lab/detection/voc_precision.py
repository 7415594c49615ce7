"""Average precision as PASCAL VOC measures it (Everingham et al., 2010), at an overlap of 1/2.

Detections of a class are taken in order of their scores. One is right if it overlaps the object of
its class that it overlaps most by 1/2 or more, and that was not found before. Difficult objects
count neither way. Precision is then averaged over recall: over its whole range (since 2010) or at
eleven points (until 2009). Unlike VOC's own program, a box from 10 to 20 is 10 pixels wide here,
not 11.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decentlam.lab.data.detection.boxed import Boxed
from decentlam.lab.detection.found import Found

OVERLAP = 0.5


def mean_precision(
    images: Sequence[Boxed], found: Sequence[Found], eleven_points: bool = False
) -> float | None:
    """The mean over the classes that the images hold."""
    held = [image.labels[~image.ignored] for image in images]
    labels = sorted({int(label) for of_image in held for label in of_image})
    values = [precision_of(images, found, label, eleven_points) for label in labels]
    return float(np.mean(values)) if values else None


def precision_of(
    images: Sequence[Boxed], found: Sequence[Found], label: int, eleven_points: bool = False
) -> float:
    """The average precision of one class."""
    total = sum(int((~image.ignored[image.labels == label]).sum()) for image in images)
    marks = [mark for one in found for mark in _marks(images[one.image], one, label)]
    marks.sort(key=lambda mark: -mark[0])
    right = np.array([is_right for _, is_right in marks], dtype=float)
    recall = np.cumsum(right) / total
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    if eleven_points:
        points = np.linspace(0, 1, 11)
        return float(np.mean([precision[recall >= r - 1e-12].max(initial=0.0) for r in points]))
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * envelope))


def _marks(image: Boxed, found: Found, label: int) -> list[tuple[float, bool]]:
    """(score, whether it is right) of the detections that count."""
    boxes, ignored = image.boxes[image.labels == label], image.ignored[image.labels == label]
    taken = np.zeros(len(boxes), dtype=bool)
    chosen = np.flatnonzero(found.labels == label)
    marks = []
    for at in chosen[np.argsort(-found.scores[chosen], kind="stable")]:
        overlap = overlaps(found.boxes[at : at + 1], boxes)[0]
        best = int(overlap.argmax()) if len(boxes) else -1
        if best < 0 or overlap[best] < OVERLAP:
            marks.append((float(found.scores[at]), False))
        elif not ignored[best]:
            marks.append((float(found.scores[at]), not taken[best]))
            taken[best] = True
    return marks


def overlaps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Intersection over union of (a, 4) and (b, 4) boxes, (a, b)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return np.asarray(common / (areas[0][:, None] + areas[1][None] - common))
