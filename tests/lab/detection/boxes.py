"""Small folders in the layouts of VOC and COCO, good ones to be spoiled by tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from decentlam.lab.detection.shapes import annotation

SIZE = (40, 32)  # width and height of every image


def write_image(file: Path, size: tuple[int, int] = SIZE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(file.stem)).integers(0, 256, (size[1], size[0], 3))
    Image.fromarray(pixels.astype(np.uint8)).save(file)


def write_voc(root: Path, part: dict[str, list[str]] | None = None) -> Path:
    """VOCdevkit/VOC2012 with images a, b (train) and c, d (val); b and d have no object."""
    year = root / "VOCdevkit" / "VOC2012"
    (year / "ImageSets" / "Main").mkdir(parents=True)
    (year / "Annotations").mkdir()
    for name, ids in (part or {"train": ["a", "b"], "val": ["c", "d"]}).items():
        (year / "ImageSets" / "Main" / f"{name}.txt").write_text("\n".join(ids) + "\n")
        for k, one in enumerate(ids):
            write_image(year / "JPEGImages" / f"{one}.jpg")
            boxes = [("person", [2, 3, 20, 30]), ("dog", [21, 4, 40, 32])] if k % 2 == 0 else []
            (year / "Annotations" / f"{one}.xml").write_text(annotation(SIZE, boxes))
    return year


def coco_content(numbers: tuple[int, ...]) -> dict[str, Any]:
    """Three boxes in the first image, one of them a crowd; none in the others."""
    boxes = [[1.0, 2.0, 10.0, 8.5], [12.0, 4.0, 20.0, 20.0], [0.0, 0.0, 40.0, 32.0]]
    return {
        "images": [
            {"id": n, "file_name": f"{n:012d}.jpg", "width": SIZE[0], "height": SIZE[1]}
            for n in numbers
        ],
        "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
        "annotations": [
            {
                "id": 10 * numbers[0] + k,
                "image_id": numbers[0],
                "category_id": (1, 18, 18)[k],
                "bbox": box,
                "area": 50.0 + k,
                "iscrowd": int(k == 2),
            }
            for k, box in enumerate(boxes)
        ],
    }


def write_coco(root: Path) -> Path:
    for part, numbers in (("train2017", (1, 2)), ("val2017", (3, 4))):
        for number in numbers:
            write_image(root / part / f"{number:012d}.jpg")
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        file = root / "annotations" / f"instances_{part}.json"
        file.write_text(json.dumps(coco_content(numbers)))
    return root
