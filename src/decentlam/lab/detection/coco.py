"""The layout of COCO: a folder of images and a JSON file of annotations for each part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

from decentlam.lab.detection.annotations import AnnotatedImage, Box, annotate, check_image
from decentlam.lab.detection.images import AnnotatedSets
from decentlam.lab.values import parse_json

_FILES = ("instances_train2017.json", "instances_val2017.json")


def read_coco(path: Path, skipped: list[str]) -> AnnotatedSets:
    """Read the training and the test set; labels are the category ids, as in torchvision's
    weights."""
    found = [path / "annotations" / name for name in _FILES]
    if not all(file.is_file() for file in found):
        raise ValueError(f"{path / 'annotations'} should have {' and '.join(_FILES)}")
    (train_names, train), (test_names, test) = (_read(path, file, skipped) for file in found)
    if train_names != test_names:
        differing = sorted(set(train_names.items()) ^ set(test_names.items()))[:3]
        raise ValueError(f"{found[0]} and {found[1]} have different categories: {differing}")
    return train_names, train, test


def _read(
    root: Path, file: Path, skipped: list[str]
) -> tuple[dict[int, str], list[AnnotatedImage]]:
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        names = {int(entry["id"]): str(entry["name"]) for entry in content["categories"]}
        images = {int(entry["id"]): entry for entry in content["images"]}
        annotations = list(content["annotations"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} is not of COCO's form: {type(error).__name__}: {error}; it needs lists of "
            "images, annotations and categories with ids"
        ) from error
    if not images or min(names, default=0) < 1:
        raise ValueError(f"{file} needs images, and categories from 1 on; 0 is no object")
    objects: dict[int, list[Box]] = {number: [] for number in images}
    for entry in annotations:
        number = entry.get("image_id") if isinstance(entry, dict) else None
        if not isinstance(number, int) or number not in images:
            raise ValueError(f"{file}: an annotation is of image {number!r}, which is not listed")
        objects[number].append(_object(entry, f"{file}: annotation {entry.get('id')}", names))
    part = file.stem.removeprefix("instances_")
    folders = [root / part, root / "images" / part]
    return names, [
        _image(entry, objects[number], file, folders, skipped) for number, entry in images.items()
    ]


def _object(entry: dict[str, Any], where: str, names: dict[int, str]) -> Box:
    label, corners, area = entry.get("category_id"), entry.get("bbox"), entry.get("area")
    if not isinstance(label, int) or label not in names:
        raise ValueError(f"{where} is of an unknown category, {label!r}")
    where += f" ({names[label]})"
    if not isinstance(corners, list) or len(corners) != 4 or not all(map(_number, corners)):
        raise ValueError(f"{where} has the bbox {corners!r}; it should be [x, y, width, height]")
    x, y, width, height = corners
    return Box(
        where,
        label,
        (x, y, x + width, y + height),
        ignored=bool(entry.get("iscrowd", 0)),
        area=float(area) if _number(area) and math.isfinite(area) else None,
    )


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _image(
    entry: dict[str, Any], objects: list[Box], file: Path, folders: list[Path], skipped: list[str]
) -> AnnotatedImage:
    where, name = f"{file}: image {entry['id']}", entry.get("file_name")
    width, height = entry.get("width"), entry.get("height")
    if not (isinstance(name, str) and isinstance(width, int) and isinstance(height, int)):
        raise ValueError(f"{where} needs a file_name, a width and a height, has {entry}")
    found = [folder / name for folder in folders if (folder / name).is_file()]
    check_image(found[0] if found else folders[0] / name, width, height, where)
    return annotate(found[0], width, height, objects, skipped)
