"""Images drawn by a program, in the layout of PASCAL VOC: discs and squares on a grey ground."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from decentlam.lab.detection.voc import CLASSES_FILE

CLASSES = ("disc", "square")


def draw_shapes(folder: Path, train: int, test: int, width: int = 64, height: int = 48) -> Path:
    """Write made-up images and their annotations, the same ones every time.

    Every fifth image is upright, and the last of each part is empty.
    """
    from PIL import Image

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
