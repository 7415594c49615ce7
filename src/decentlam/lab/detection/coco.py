"""The layout of COCO: a folder of images and a JSON file of annotations for each part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

from decentlam.lab.detection.annotations import AnnotatedImage, BadBoxes, Box, annotate, check_image
from decentlam.lab.detection.images import AnnotatedSets
from decentlam.lab.values import parse_json

# Names of the two files in `annotations`: as published, then those of folders of one's own.
_FILES = (
    ("instances_train2017", "instances_val2017"),
    ("instances_train", "instances_val"),
    ("train", "val"),
)

Entry = dict[str, Any]


def read_coco(path: Path, bad: BadBoxes) -> AnnotatedSets:
    """Read the training and the test set; labels are the category ids, as in torchvision's
    weights."""
    folder = path / "annotations"
    pairs = [[folder / f"{name}.json" for name in pair] for pair in _FILES]
    found = next((pair for pair in pairs if all(file.is_file() for file in pair)), None)
    if found is None:
        names = " or ".join(" and ".join(f"{name}.json" for name in pair) for pair in _FILES)
        raise ValueError(f"{folder} should have {names}, and has none of these pairs")
    (train_names, train), (test_names, test) = (_read(path, file, bad) for file in found)
    if train_names != test_names:
        differing = sorted(set(train_names.items()) ^ set(test_names.items()))[:3]
        raise ValueError(f"{found[0]} and {found[1]} have different categories: {differing}")
    return AnnotatedSets(train_names, train, test)


def _read(
    root: Path, file: Path, bad: BadBoxes
) -> tuple[dict[int, str], tuple[AnnotatedImage, ...]]:
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise ValueError(f"{file} has no list of {key}")
    if not content["images"]:
        raise ValueError(f"{file} lists no images")
    names = _by_id(content["categories"], f"{file}: categories")
    categories = {number: str(entry.get("name", number)) for number, entry in names.items()}
    if any(number < 1 for number in categories):
        raise ValueError(f"{file}: category {min(categories)} is not 1 or more; 0 is no object")
    images = _by_id(content["images"], f"{file}: images")
    objects: dict[int, list[Box]] = {number: [] for number in images}
    for entry in _by_id(content["annotations"], f"{file}: annotations").values():
        where = f"{file}: annotation {entry['id']}"
        if entry.get("image_id") not in images:
            raise ValueError(f"{where} is of image {entry.get('image_id')!r}, which is not listed")
        objects[entry["image_id"]].append(_object(entry, where, categories))
    folders = _folders(root, file.stem.removeprefix("instances_"))
    return categories, tuple(
        _image(entry, objects[number], file, folders, bad) for number, entry in images.items()
    )


def _by_id(entries: list[Entry], where: str) -> dict[int, Entry]:
    found: dict[int, Entry] = {}
    for at, entry in enumerate(entries):
        number = entry.get("id") if isinstance(entry, dict) else None
        if not _whole(number):
            raise ValueError(f"{where}: number {at} in the list has no id that is a whole number")
        if number in found:
            raise ValueError(f"{where}: the id {number} is there twice")
        found[number] = entry
    return found


def _object(entry: Entry, where: str, categories: dict[int, str]) -> Box:
    label, corners, area = entry.get("category_id"), entry.get("bbox"), entry.get("area")
    if label not in categories:
        raise ValueError(f"{where} is of an unknown category, {label!r}")
    where += f" ({categories[label]})"
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


def _folders(root: Path, part: str) -> list[Path]:
    """Return where images of a part may be. COCO128 keeps those of both parts with the training
    set."""
    train = part.replace("val", "train")
    return [root / part, root / "images" / part, root / "images", root / train]


def _image(
    entry: Entry, objects: list[Box], file: Path, folders: list[Path], bad: BadBoxes
) -> AnnotatedImage:
    where = f"{file}: image {entry['id']}"
    name, width, height = entry.get("file_name"), entry.get("width"), entry.get("height")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} has no file_name")
    if not (_whole(width) and _whole(height) and width > 0 and height > 0):
        raise ValueError(f"{where} has width {width!r} and height {height!r}, not whole pixels")
    found = [folder / name for folder in folders if (folder / name).is_file()]
    check_image(found[0] if found else folders[0] / name, width, height, where)
    return annotate(found[0], width, height, objects, bad)


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
