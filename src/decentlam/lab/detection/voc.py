"""The layout of PASCAL VOC: JPEGImages, Annotations/*.xml and ImageSets/Main/*.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from decentlam.lab.detection.annotations import AnnotatedImage, AnnotatedSets, Box, annotate

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
BCCD_CLASSES = ("RBC", "WBC", "Platelets")
CLASSES_FILE = "classes.txt"  # in a folder with classes of its own, one per line
_SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read_voc(path: Path, skipped: list[str], classes: tuple[str, ...]) -> AnnotatedSets:
    """Read the training and the test set of a folder in this layout.

    With VOC2007 and VOC2012 side by side: both trainval parts, and the test part of 2007, as
    published results have it. Otherwise trainval and test where there is a test part, else train
    and val.
    """
    root = path / "VOCdevkit" if (path / "VOCdevkit").is_dir() else path
    years = [f for f in (root, *sorted(root.glob("VOC*"))) if (f / "ImageSets" / "Main").is_dir()]
    if [year.name for year in years] == ["VOC2007", "VOC2012"]:
        train, test = [(year, "trainval") for year in years], (years[0], "test")
    elif len(years) == 1:
        tested = (years[0] / "ImageSets" / "Main" / "test.txt").is_file()
        train = [(years[0], "trainval" if tested else "train")]
        test = (years[0], "test" if tested else "val")
    else:
        raise ValueError(
            f"{root} should be or hold one folder with JPEGImages, Annotations and ImageSets/Main, "
            f"or VOC2007 and VOC2012; it has {', '.join(year.name for year in years) or 'none'}"
        )
    if (years[0] / CLASSES_FILE).is_file():
        lines = map(str.strip, (years[0] / CLASSES_FILE).read_text(encoding="utf-8").splitlines())
        classes = tuple(filter(None, lines))
    labels = {name: label for label, name in enumerate(classes, start=1)}
    return (
        {label: name for name, label in labels.items()},
        [image for part in train for image in _read(*part, labels, skipped)],
        _read(*test, labels, skipped),
    )


def _read(
    year: Path, part: str, labels: dict[str, int], skipped: list[str]
) -> list[AnnotatedImage]:
    file = year / "ImageSets" / "Main" / f"{part}.txt"
    if not file.is_file():
        raise ValueError(f"there is no {file}, the list of the images of {part}")
    lines = file.read_text(encoding="utf-8").splitlines()
    ids = [line.split()[0] for line in lines if line.strip()]
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"{file} names {'an image twice' if ids else 'no image'}")
    return [_read_one(year, name, labels, skipped) for name in ids]


def _read_one(year: Path, name: str, labels: dict[str, int], skipped: list[str]) -> AnnotatedImage:
    file = year / "Annotations" / f"{name}.xml"
    boxes = []
    try:
        root: Any = ElementTree.parse(file).getroot()
        size = (int(root.findtext("size/width")), int(root.findtext("size/height")))
        for k, node in enumerate(root.findall("object"), 1):
            named = node.findtext("name").strip()
            corners = [float(node.findtext(f"bndbox/{corner}")) for corner in _CORNERS]
            difficult = (node.findtext("difficult") or "0").strip() == "1"
            where = f"{file}: object {k} ({named})"
            boxes.append(Box(where, labels.get(named, 0), corners, difficult))
    except FileNotFoundError:
        raise ValueError(f"there is no annotation {file} for the image {name}") from None
    except (ElementTree.ParseError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"{file} is not of VOC's form: {error}, after {len(boxes)} objects; it needs an "
            f"annotation with size/width and size/height, and objects with a name and bndbox/"
            f"{', bndbox/'.join(_CORNERS)}"
        ) from error
    for box in boxes:
        if box.label == 0:
            raise ValueError(
                f"{box.where} is of an unknown class; known are {', '.join(labels)}. A folder of "
                f"your own names its classes in {CLASSES_FILE}, one per line"
            )
    images = [year / "JPEGImages" / f"{name}{suffix}" for suffix in _SUFFIXES]
    image = next((image for image in images if image.is_file()), images[0])
    return annotate(image, size, boxes, file, skipped)
