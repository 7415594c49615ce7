"""Annotations of VOC and COCO are read as published, and refused by name where they are bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decentlam.lab.detection import load_boxes
from tests.lab.detection.boxes import coco_content, draw_shapes, write_coco, write_voc


def test_voc_is_read_as_published(tmp_path: Path):
    write_voc(tmp_path)
    for path in (tmp_path, tmp_path / "VOCdevkit", tmp_path / "VOCdevkit" / "VOC2012"):
        data = load_boxes("voc", path, 32)
        assert (len(data.train), len(data.test), data.classes) == (2, 2, 21)
        full, empty = data.train
        assert [data.names[label] for label in full.labels] == ["person", "dog"]
        assert full.boxes.tolist() == [[2, 3, 20, 30], [21, 4, 40, 32]]
        assert full.areas.tolist() == [18 * 27, 19 * 28]
        assert (full.main_label, len(empty.boxes), empty.main_label) == (12, 0, 0)
        assert data.labels.tolist() == [12, 0]  # the dog is before the person in the alphabet


def test_both_years_of_voc_are_joined_for_training(tmp_path: Path):
    write_voc(tmp_path, {"trainval": ["x", "y"]})
    write_voc(tmp_path / "other", {"trainval": ["p"], "test": ["q"]})
    (tmp_path / "other" / "VOCdevkit" / "VOC2012").rename(tmp_path / "VOCdevkit" / "VOC2007")
    data = load_boxes("voc", tmp_path, 32)
    assert [image.file.stem for image in data.train] == ["p", "x", "y"]
    assert [image.file.stem for image in data.test] == ["q"]


def test_a_folder_of_ones_own_names_its_classes(tmp_path: Path):
    data = load_boxes("voc", draw_shapes(tmp_path, train=10, test=4), 32)
    assert data.names == {1: "disc", 2: "square"}
    assert [len(part) for part in (data.train, data.test)] == [10, 4]
    assert sum(not len(image.boxes) for image in data.train) == 1


def test_difficult_objects_and_crowds_are_kept_apart(tmp_path: Path):
    year = write_voc(tmp_path)
    file = year / "Annotations" / "a.xml"
    file.write_text(file.read_text().replace("<difficult>0", "<difficult>1", 1))
    data = load_boxes("voc", tmp_path, 32)
    assert data.train[0].ignored.tolist() == [True, False]
    _, targets, _ = data.train_batch(torch.tensor([0]), torch.Generator().manual_seed(0))
    assert targets[0]["labels"].tolist() == [12]  # what is difficult is not learned
    crowded = load_boxes("coco", write_coco(tmp_path / "coco"), 32).train[0]
    assert crowded.ignored.tolist() == [False, False, True]


def test_coco_is_read_as_published(tmp_path: Path):
    data = load_boxes("coco", write_coco(tmp_path), 32)
    full, empty = data.train
    assert data.names == {1: "person", 18: "dog"} and data.classes == 19
    assert full.boxes.tolist() == [[1, 2, 11, 10.5], [12, 4, 32, 24], [0, 0, 40, 32]]
    assert full.areas.tolist() == [50, 51, 52] and len(empty.boxes) == 0
    for part in ("train2017", "val2017"):  # images/PART, as many tools have it
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / part).rename(tmp_path / "images" / part)
    assert load_boxes("coco", tmp_path, 32).train[0].file.is_file()


def in_voc(old: str, new: str, file: str = "Annotations/a.xml") -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        path = root / "VOCdevkit" / "VOC2012" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return spoil


def in_coco(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of the first annotation, or of whatever `of` names."""
    kind = changes.pop("of", "annotations")

    def spoil(root: Path) -> None:
        content = coco_content((1, 2))
        content[kind][0].update(changes)
        text = json.dumps(content)
        (root / "annotations" / "instances_train2017.json").write_text(text)

    return spoil


def without(file: str) -> Callable[[Path], None]:
    return lambda root: (root / file).unlink()


def content(file: str, text: str) -> Callable[[Path], int]:
    return lambda root: (root / file).write_text(text)


VOC = "VOCdevkit/VOC2012"
XML, JSON = f"{VOC}/Annotations/a.xml", "annotations/instances_train2017.json"
BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no number": ("voc", in_voc("<xmin>2<", "<xmin>two<"), "not of VOC's form: could not convert"),
    "unknown class": (
        *("voc", in_voc(">dog<", ">unicorn<")),
        "a.xml: object 2 (unicorn) is of an unknown class; known are aeroplane, bicycle",
    ),
    "another size": ("voc", in_voc("<width>40<", "<width>50<"), "a.jpg is 40 x 32 pixels, but "),
    "not xml": ("voc", content(XML, "<annotation>"), "a.xml is not of VOC's form: no element"),
    "no annotation": ("voc", without(XML), "there is no annotation "),
    "no image": ("voc", without(f"{VOC}/JPEGImages/a.jpg"), "a.jpg, which does not exist"),
    "no jpeg": ("voc", content(f"{VOC}/JPEGImages/a.jpg", "?"), "is not an image that can be read"),
    "twice": ("voc", content(f"{VOC}/ImageSets/Main/train.txt", "a\na\n"), "names an image twice"),
    "not json": ("coco", content(JSON, "{"), "instances_train2017.json is not of COCO's form"),
    "no list": ("coco", content(JSON, '{"images": []}'), "KeyError: 'categories'"),
    "no bbox": (
        "coco",
        in_coco(bbox=None),
        "TypeError: 'NoneType' object is not iterable, in {",
    ),
    "unknown category": ("coco", in_coco(category_id=5), "KeyError: 5, in {'id': 10"),
    "unknown image": ("coco", in_coco(image_id=9), "KeyError: 9, in {'id': 10"),
    "missing file": ("coco", in_coco(of="images", file_name="z.jpg"), "z.jpg, which does not"),
    "other width": ("coco", in_coco(of="images", width=41), "is 40 x 32 pixels, but "),
    "other names": ("coco", in_coco(of="categories", name="cat"), "have different categories"),
    "no files": ("coco", without(JSON), "should have instances_train2017.json and instances_val"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_annotations_are_refused_by_name(case: str, tmp_path: Path):
    name, spoil, words = BAD[case]
    (write_voc if name == "voc" else write_coco)(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_boxes(name, tmp_path, 32)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)  # the file, with its folder


@pytest.mark.parametrize(
    ("corner", "words"),
    [
        ("xmax>2", "has no size: from (2, 3) to (2, 30)"),
        ("xmin>-2", "is outside its image of 40 x 32: (-2, 3, 20, 30)"),
        ("xmin>nan", "is not finite: (nan, 3, 20, 30)"),
    ],
)
def test_bad_boxes_are_left_out_and_named(corner: str, words: str, tmp_path: Path):
    write_voc(tmp_path)
    name, _ = corner.split(">")
    in_voc(f"<{name}>{20 if name == 'xmax' else 2}<", f"<{corner}<")(tmp_path)
    data = load_boxes("voc", tmp_path, 32)
    (skipped,) = data.skipped
    assert skipped.endswith(f"a.xml: object 1 (person) {words}") and str(tmp_path) in skipped
    assert data.train[0].boxes.tolist() == [[21, 4, 40, 32]]


def test_a_box_that_sticks_out_by_rounding_is_cut(tmp_path: Path):
    write_voc(tmp_path)
    in_voc("<xmax>40<", "<xmax>40.4<")(tmp_path)
    assert load_boxes("voc", tmp_path, 32).train[0].boxes[1].tolist() == [21, 4, 40, 32]


@pytest.mark.parametrize("path", [None, "nowhere"])
def test_missing_data_says_what_is_needed(path: str | None):
    with pytest.raises(ValueError, match=r"bccd needs --data-path, the BCCD data set"):
        load_boxes("bccd", path, 96)
    with pytest.raises(ValueError, match="unknown data 'nope'; choose from voc, coco, bccd"):
        load_boxes("nope", path, 96)
