"""The scores of a detector: COCO's by pycocotools, and PASCAL VOC's average precision."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from decentlam.lab.data.detection.boxed import Boxed
from decentlam.lab.detection.found import Found
from decentlam.lab.detection.voc_precision import mean_precision

MAIN = "ap50"
# The order of COCOeval.stats.
_COCO = ("ap", MAIN, "ap75", "ap_small", "ap_medium", "ap_large")

Numbers = dict[str, float | None]


def score(images: Sequence[Boxed], names: Mapping[int, str], found: Sequence[Found]) -> Numbers:
    """From 0 to 1; None where no object is of the size in question."""
    stats = coco_stats(images, names, found)
    numbers: Numbers = {
        name: value if value >= 0 else None for name, value in zip(_COCO, stats, strict=False)
    }
    numbers["voc_ap50"] = mean_precision(images, found)
    numbers["voc_ap50_11"] = mean_precision(images, found, eleven_points=True)
    return numbers


def coco_stats(
    images: Sequence[Boxed], names: Mapping[int, str], found: Sequence[Found]
) -> list[float]:
    """The twelve numbers that COCOeval prints; -1 where there is nothing to measure.

    VOC's difficult objects are given to it as crowds: they are neither learned nor missed.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = [
        _entry(number, at, box, label) | {"area": float(area), "iscrowd": int(ignored)}
        for number, (at, box, label, area, ignored) in enumerate(_truth(images), start=1)
    ]
    seen = [
        _entry(number, at, box, label) | {"score": float(value), "iscrowd": 0}
        for number, (at, box, label, value) in enumerate(_seen(found), start=1)
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
                "annotations": entries,
            }
            known[-1].createIndex()
        evaluation = COCOeval(*known, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats]


def _entry(number: int, image: int, box: Sequence[float], label: int) -> dict[str, Any]:
    x1, y1, x2, y2 = map(float, box)
    return {
        "id": number,
        "image_id": image + 1,
        "category_id": int(label),
        "bbox": [x1, y1, x2 - x1, y2 - y1],
    }


def _truth(images: Sequence[Boxed]) -> list[tuple[Any, ...]]:
    return [
        (at, *values)
        for at, image in enumerate(images)
        for values in zip(image.boxes, image.labels, image.areas, image.ignored, strict=True)
    ]


def _seen(found: Sequence[Found]) -> list[tuple[Any, ...]]:
    return [
        (one.image, *values)
        for one in found
        for values in zip(one.boxes, one.labels, one.scores, strict=True)
    ]
