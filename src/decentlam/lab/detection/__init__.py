"""Data for object detection: images with boxes, in the layouts of PASCAL VOC and COCO."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from decentlam.lab.detection.annotations import AnnotatedSets
from decentlam.lab.detection.coco import read_coco
from decentlam.lab.detection.images import DetectionData
from decentlam.lab.detection.voc import BCCD_CLASSES, VOC_CLASSES, read_voc

__all__ = ["DETECTION_DATASETS", "DetectionData", "load_boxes"]

DETECTION_DATASETS: dict[str, Callable[[Path, list[str]], AnnotatedSets]] = {
    "voc": partial(read_voc, classes=VOC_CLASSES),
    "coco": read_coco,
    "bccd": partial(read_voc, classes=BCCD_CLASSES),
}

_HOW = {
    "voc": "a folder with JPEGImages, Annotations and ImageSets, or the VOCdevkit that holds it",
    "coco": "a folder with annotations/instances_train2017.json and train2017",
    "bccd": "the BCCD data set (blood cells, MIT licence): a folder with JPEGImages, Annotations "
    "and ImageSets, as published",
}


def load_boxes(name: str, path: str | Path | None, image_size: int) -> DetectionData:
    """Read and check the data set of that name as a whole: every annotation, every image's size.

    A box that has no size or is not inside its image is left out and listed in `skipped`.
    """
    if name not in DETECTION_DATASETS:
        raise ValueError(f"unknown data {name!r}; choose from {', '.join(DETECTION_DATASETS)}")
    if path is None or not Path(path).is_dir():
        given = "no path was given" if path is None else f"there is no folder {path}"
        raise ValueError(f"{given}: {name} needs --data-path, {_HOW[name]}")
    skipped: list[str] = []
    names, train, test = DETECTION_DATASETS[name](Path(path), skipped)
    return DetectionData(names, train, test, image_size, skipped)
