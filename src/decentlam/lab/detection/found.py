"""What a detector found in one image of the test set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Found:
    """Boxes in the image's own pixels, with their labels and scores, best first."""

    image: int  # its place in the test set
    boxes: np.ndarray  # (k, 4) float64: x1, y1, x2, y2
    labels: np.ndarray  # (k,) int64
    scores: np.ndarray  # (k,) float64

    def plain(self) -> list[Any]:
        """As lists and numbers, which processes can send each other."""
        return [int(self.image), self.boxes.tolist(), self.labels.tolist(), self.scores.tolist()]


def from_plain(image: int, boxes: list[Any], labels: list[Any], scores: list[Any]) -> Found:
    """What `plain` described."""
    rows = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    return Found(image, rows, np.array(labels, dtype=np.int64), np.array(scores, dtype=np.float64))


def from_output(image: int, output: dict[str, Tensor], scale: tuple[float, float]) -> Found:
    """What torchvision's detectors return for an image that was resized by `scale`."""
    boxes = output["boxes"].double().cpu().numpy() / np.array([*scale, *scale])
    labels = output["labels"].cpu().numpy()
    kept = labels > 0  # RetinaNet has a place for the background, too
    scores = output["scores"].double().cpu().numpy()
    return Found(image, boxes[kept], labels[kept], scores[kept])


def ordered(parts: Iterable[Sequence[Found]], images: int) -> list[Found]:
    """What several nodes found in their shares of the test set, by image.

    Every image must be there once: one that two nodes looked at would count twice.
    """
    found = sorted((one for part in parts for one in part), key=lambda one: one.image)
    seen = [one.image for one in found]
    assert seen == list(range(images)), f"{images} test images, but {seen} were looked at"
    return found
