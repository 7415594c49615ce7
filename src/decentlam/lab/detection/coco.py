"""The layout of COCO: a folder of images and a JSON file of annotations for each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decentlam.lab.detection.annotations import AnnotatedImage, AnnotatedSets, Box, annotate
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
    part = file.stem.removeprefix("instances_")
    entry: Any = "the file"
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        names = {int(entry["id"]): str(entry["name"]) for entry in content["categories"]}
        boxes: dict[int, list[Box]] = {entry["id"]: [] for entry in content["images"]}
        for entry in content["annotations"]:
            x, y, width, height = map(float, entry["bbox"])
            label = entry["category_id"]
            box = Box(
                f"{file}: annotation {entry['id']} ({names[label]})",
                int(label),
                (x, y, x + width, y + height),
                ignored=bool(entry.get("iscrowd", 0)),
                area=float(entry["area"]) if "area" in entry else None,
            )
            boxes[entry["image_id"]].append(box)
        images = []
        for entry in content["images"]:
            folders = [root / part, root / "images" / part]
            places = [folder / entry["file_name"] for folder in folders]
            place = next((place for place in places if place.is_file()), places[0])
            images.append((place, (entry["width"], entry["height"]), boxes[entry["id"]]))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{file} is not of COCO's form: {type(error).__name__}: {error}, in {entry!s:.300}; it "
            "needs lists of images, annotations and categories, which name each other by id"
        ) from error
    if not images or min(names, default=0) < 1:
        raise ValueError(f"{file} needs images, and categories from 1 on; 0 is no object")
    return names, [annotate(place, size, of, file, skipped) for place, size, of in images]
