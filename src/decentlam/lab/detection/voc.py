"""The layout of PASCAL VOC: JPEGImages, Annotations/*.xml and ImageSets/Main/*.txt."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from decentlam.lab.detection.annotations import AnnotatedImage, Box, annotate, check_image
from decentlam.lab.detection.images import AnnotatedSets

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
    both = [root / "VOC2007", root / "VOC2012"]
    if all(year.is_dir() for year in both):
        train, test = [(year, "trainval") for year in both], [(both[0], "test")]
    else:
        year = _only_year(root)
        tested = (_lists(year) / "test.txt").is_file()
        train, test = (
            [(year, "trainval" if tested else "train")],
            [(year, "test" if tested else "val")],
        )
    folder = train[0][0]
    if (folder / CLASSES_FILE).is_file():
        lines = map(str.strip, (folder / CLASSES_FILE).read_text(encoding="utf-8").splitlines())
        classes = tuple(filter(None, lines))
    labels = {name: label for label, name in enumerate(classes, start=1)}
    return (
        {label: name for name, label in labels.items()},
        [image for part in train for image in _read(*part, labels, skipped)],
        [image for part in test for image in _read(*part, labels, skipped)],
    )


def _only_year(root: Path) -> Path:
    found = [f for f in (root, *sorted(root.glob("VOC*"))) if _lists(f).is_dir()]
    if len(found) == 1:
        return found[0]
    there = f"has {', '.join(f.name for f in found)}: give one of them" if found else "has none"
    raise ValueError(
        f"{root} should be or hold a folder with JPEGImages, Annotations and ImageSets/Main; it "
        f"{there}"
    )


def _lists(year: Path) -> Path:
    return year / "ImageSets" / "Main"


def _read(
    year: Path, part: str, labels: dict[str, int], skipped: list[str]
) -> list[AnnotatedImage]:
    file = _lists(year) / f"{part}.txt"
    if not file.is_file():
        raise ValueError(f"there is no {file}, the list of the images of {part}")
    ids = [
        line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    if not ids:
        raise ValueError(f"{file} names no image")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{file} names an image twice")
    return [_read_one(year, name, labels, skipped) for name in ids]


def _read_one(year: Path, name: str, labels: dict[str, int], skipped: list[str]) -> AnnotatedImage:
    file = year / "Annotations" / f"{name}.xml"
    try:
        root = ElementTree.parse(file).getroot()
    except FileNotFoundError:
        raise ValueError(f"there is no annotation {file} for the image {name}") from None
    except ElementTree.ParseError as error:
        raise ValueError(f"{file} is not XML: {error}") from error
    if root.tag != "annotation":
        raise ValueError(f"{file} is <{root.tag}>, not an <annotation>")
    width, height = (_size(root, side, file) for side in ("width", "height"))
    stems = [year / "JPEGImages" / f"{name}{suffix}" for suffix in _SUFFIXES]
    image = next((stem for stem in stems if stem.is_file()), stems[0])
    check_image(image, width, height, str(file))
    objects = [_object(node, k, file, labels) for k, node in enumerate(root.findall("object"), 1)]
    return annotate(image, width, height, objects, skipped)


def _size(root: Element, side: str, file: Path) -> int:
    text = root.findtext(f"size/{side}")
    if text is None or not text.strip().isdecimal() or int(text) < 1:
        given = "no" if text is None else repr(text)
        raise ValueError(f"{file} has {given} size/{side}; it should be a whole number of pixels")
    return int(text)


def _object(node: Element, number: int, file: Path, labels: dict[str, int]) -> Box:
    name = (node.findtext("name") or "").strip()
    where = f"{file}: object {number}"
    if not name:
        raise ValueError(f"{where} has no name")
    where += f" ({name})"
    if name not in labels:
        raise ValueError(
            f"{where} is of an unknown class; known are {', '.join(labels)}. A folder of your own "
            f"names its classes in {CLASSES_FILE}, one per line"
        )
    corners = []
    for corner in _CORNERS:
        text = node.findtext(f"bndbox/{corner}")
        try:
            corners.append(math.nan if text is None else float(text))
        except ValueError:
            raise ValueError(f"{where} has {corner} {text!r}, not a number") from None
        if text is None:
            raise ValueError(f"{where} has no bndbox/{corner}")
    difficult = (node.findtext("difficult") or "0").strip() == "1"
    return Box(where, labels[name], corners, ignored=difficult)
