"""An annotated image, and the checks that it and its boxes must pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

_ROUNDING = 0.5  # pixels by which a box may extend beyond its image; it is clipped


@dataclass(frozen=True, eq=False)
class AnnotatedImage:
    """An image and the boxes in it, in its own pixels: x1, y1, x2, y2 with x1 < x2 and y1 < y2."""

    file: Path
    width: int
    height: int
    boxes: np.ndarray  # (k, 4) float64
    labels: np.ndarray  # (k,) int64, from 1 on
    ignored: np.ndarray  # (k,) bool: VOC's difficult and COCO's crowds, neither learned nor missed
    areas: np.ndarray  # (k,) float64, as annotated; decides what is small, medium or large

    @property
    def main_label(self) -> int:
        """The most frequent label (the lowest of equally frequent ones); 0 without boxes."""
        return int(np.bincount(self.labels).argmax()) if len(self.labels) else 0


# What a reader returns: the names of the labels, the training set, the test set.
AnnotatedSets = tuple[dict[int, str], list[AnnotatedImage], list[AnnotatedImage]]


class Box(NamedTuple):
    """One annotated object, before it is checked; `where` names file and object."""

    where: str
    label: int
    corners: Sequence[float]  # x1, y1, x2, y2
    ignored: bool
    area: float | None = None


def annotate(
    file: Path, size: tuple[int, int], boxes: Sequence[Box], where: Path, skipped: list[str]
) -> AnnotatedImage:
    """Return the image with its valid boxes; add the reasons against the others to `skipped`.

    A ValueError is raised if the file is missing, no image, or of another size than annotated.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:  # reads the header only
            found = image.size
    except FileNotFoundError:
        raise ValueError(f"{where} is about {file}, which does not exist") from None
    except OSError as error:
        raise ValueError(f"{file} is not an image that can be read: {error}") from error
    if found != size:
        raise ValueError(
            f"{file} is {found[0]} x {found[1]} pixels, but {where} says {size[0]} x {size[1]}"
        )
    problems = [_problem(box, *size) for box in boxes]
    skipped += filter(None, problems)
    boxes = [box for box, problem in zip(boxes, problems, strict=True) if problem is None]
    corners = np.array([box.corners for box in boxes], dtype=float).reshape(-1, 4)
    corners = np.clip(corners, 0, [*size, *size])
    sizes = (corners[:, 2:] - corners[:, :2]).prod(1)
    areas = [own if b.area is None else b.area for b, own in zip(boxes, sizes, strict=True)]
    return AnnotatedImage(
        file,
        *size,
        corners,
        np.array([box.label for box in boxes], dtype=np.int64),
        np.array([box.ignored for box in boxes], dtype=bool),
        np.array(areas, dtype=float),
    )


def _problem(box: Box, width: int, height: int) -> str | None:
    x1, y1, x2, y2 = box.corners
    words = ", ".join(f"{value:g}" for value in box.corners)
    if not all(map(math.isfinite, box.corners)):
        return f"{box.where} is not finite: ({words})"
    if x2 <= x1 or y2 <= y1:
        return f"{box.where} has no size: from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g})"
    if min(x1, y1) < -_ROUNDING or x2 > width + _ROUNDING or y2 > height + _ROUNDING:
        return f"{box.where} is outside its image of {width} x {height}: ({words})"
    return None
