"""A few test images with their detections, kept in the run directory for the report."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decentlam.lab.detection.annotations import AnnotatedImage
from decentlam.lab.detection.images import DetectionData
from decentlam.lab.detection.scores import Detections

FILE = "detections.json"
IMAGES = 4
SURE = 0.3  # the lowest score that is shown
_SIDE = 320  # pixels of the longer side


def write(directory: Path, data: DetectionData, detections: Sequence[Detections]) -> None:
    """Write images evenly spread over the test set, the same ones for every run on the same
    data."""
    count = min(IMAGES, len(data.test))
    chosen = [len(data.test) * k // count for k in range(count)]
    content = {
        "names": {str(label): name for label, name in data.names.items()},
        "sure": SURE,
        "images": [_picture(data.test[at], detections[at]) for at in chosen],
    }
    draft = directory / f".{FILE}.new"
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(directory / FILE)


def _picture(image: AnnotatedImage, one: Detections) -> dict[str, Any]:
    sure = one.scores >= SURE
    return {
        "name": image.file.stem,
        "width": image.width,
        "height": image.height,
        "jpeg": _jpeg(image),
        "truth": _boxes(image.boxes, image.labels),
        "found": _boxes(one.boxes[sure], one.labels[sure], one.scores[sure]),
    }


def _boxes(boxes: np.ndarray, labels: np.ndarray, *more: np.ndarray) -> list[list[float]]:
    columns = [boxes.round(1).tolist(), labels.tolist(), *(m.round(3).tolist() for m in more)]
    return [[*box, *values] for box, *values in zip(*columns, strict=True)]


def _jpeg(image: AnnotatedImage) -> str:
    from PIL import Image

    with Image.open(image.file) as opened:
        small = opened.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return base64.b64encode(file.getvalue()).decode()
