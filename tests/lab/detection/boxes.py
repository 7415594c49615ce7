"""Small folders in the layouts of VOC and COCO, to be spoiled, and drawn shapes to learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from decentlam.lab.detection.voc import CLASSES_FILE

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


CLASSES = ("disc", "square")


def draw_shapes(folder: Path, train: int, test: int, width: int = 64, height: int = 48) -> Path:
    """Write made-up images and their annotations, the same ones every time.

    Every fifth image is upright, and the last of each part is empty.
    """
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / CLASSES_FILE).write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    number = 0
    for part, count in (("train", train), ("val", test)):
        names = []
        for k in range(count):
            number += 1
            size = (height, width) if k % 5 == 4 else (width, height)
            objects = 0 if k == count - 1 else 1 + number % 3
            pixels, boxes = _image(np.random.default_rng([number, *size]), size, objects)
            names.append(f"{number:05d}")
            Image.fromarray(pixels).save(folder / "JPEGImages" / f"{names[-1]}.png")
            text = annotation(size, boxes)
            (folder / "Annotations" / f"{names[-1]}.xml").write_text(text, encoding="utf-8")
        lists = folder / "ImageSets" / "Main" / f"{part}.txt"
        lists.write_text("\n".join(names) + "\n", encoding="utf-8")
    return folder


def annotation(size: tuple[int, int], boxes: list[tuple[str, list[int]]]) -> str:
    """Return the XML of an image."""
    corners = ("xmin", "ymin", "xmax", "ymax")
    objects = "".join(
        f"<object><name>{name}</name><difficult>0</difficult><bndbox>"
        + "".join(f"<{c}>{value}</{c}>" for c, value in zip(corners, box, strict=True))
        + "</bndbox></object>"
        for name, box in boxes
    )
    width, height = size
    return (
        f"<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        f"{objects}</annotation>\n"
    )


def _image(
    random: np.random.Generator, size: tuple[int, int], objects: int
) -> tuple[np.ndarray, list[tuple[str, list[int]]]]:
    width, height = size
    pixels = random.normal(128, 8, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    boxes = []
    for _ in range(objects):
        radius = int(random.integers(5, 11))
        column, row = (int(random.integers(radius, side - radius)) for side in size)
        kind = int(random.integers(2))
        far = (x - column) ** 2 + (y - row) ** 2 < radius**2
        near = (abs(x - column) < radius) & (abs(y - row) < radius)
        pixels[(far, near)[kind]] = random.normal((220, 60, 60) if kind == 0 else (60, 60, 220), 10)
        boxes.append(
            (CLASSES[kind], [column - radius, row - radius, column + radius, row + radius])
        )
    return pixels.clip(0, 255).astype(np.uint8), boxes
