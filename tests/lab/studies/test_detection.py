"""The study of Table 6 on drawn shapes: what it trains, and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab.detection.shapes import draw_shapes
from decentlam.lab.studies import STUDIES, detection, paper
from decentlam.lab.studies.study import Result, perform
from decentlam.lab.studies.sweep import name, train_in_place

METHODS = ("dmsgd", "decentlam")


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[Path, Result]:
    """Two methods, one detector, a few images."""
    directory = tmp_path_factory.mktemp("study")
    shapes = draw_shapes(directory / "shapes", train=8, test=5)
    whole = detection.recipe(nodes=2, data="voc", data_path=str(shapes))
    case = replace(whole.cases[1], epochs=1.0, seeds=(0,))
    setting = replace(
        whole, methods=METHODS, cases=(case,), topology="ring", image_size=32, batch=8
    )
    for method in METHODS:  # in this process, so that the study finds its runs and starts no others
        recipe = detection.trained(setting, case, setting.data_path, method, 0)
        train_in_place(recipe, directory / "runs" / name(recipe))
    return directory, perform(detection.STUDY, setting, directory)


def test_the_table_has_the_shape_of_table_6(study: tuple[Path, Result]):
    _, result = study
    rows = {row["method"]: row for row in result.table}
    assert list(rows) == list(METHODS)
    assert rows["decentlam"]["paper:_VOC_R-Net"] == "79.3"
    assert rows["dmsgd"]["paper:_COCO_R-Net"] == "36.1"
    assert {path.name for path in result.files} >= {"table.md", "detection.png", "records.jsonl"}
    assert "DecentLaM's lead over DmSGD in points of AP50" in " ".join(result.notes)


def test_the_study_trains_the_papers_methods():
    setting = STUDIES["detection"].recipe(data_path="bccd")
    assert setting.methods == tuple(paper.DETECTION) and setting.nodes == 8
    assert [len(case.seeds) for case in setting.cases] >= [3, 1]
    assert {case.recipe for case in setting.cases} == {"bccd-faster-rcnn", "bccd-retinanet"}
    recipe = detection.trained(setting, setting.cases[0], "bccd", "pmsgd-lars", 1)
    assert recipe.hyper == (("trust", setting.lars_trust),)


def test_without_data_the_error_says_what_to_do(tmp_path: Path):
    with pytest.raises(ValueError, match=r"bccd needs --data-path.*Or try --quick"):
        detection.run(detection.recipe(), directory=tmp_path)
