"""The study of Table 6 on drawn shapes: what it trains, its table and baselines, and its page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from decentlam.lab.detection.shapes import draw_shapes
from decentlam.lab.report import write
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


def test_the_table_has_the_shape_of_table_6_and_the_baselines(study: tuple[Path, Result]):
    _, result = study
    rows = {row["method"]: row for row in result.table}
    assert list(rows) == [*METHODS, "untrained", "commonest boxes"]
    assert rows["decentlam"]["paper:_VOC_R-Net"] == "79.3"
    assert rows["dmsgd"]["paper:_COCO_R-Net"] == "36.1"
    assert rows["untrained"]["paper:_VOC_R-Net"] is rows["untrained"]["nodes' AP50,_R-Net"] is None
    assert float(rows["commonest boxes"]["AP50,_R-Net"]) >= float(rows["untrained"]["AP50,_R-Net"])
    assert {path.name for path in result.files} >= {"table.md", "detection.png", "records.jsonl"}
    notes = " ".join(result.notes)
    assert "8 for training, 5 for testing" in notes and "0 bad boxes" in notes
    assert "DecentLaM's lead over DmSGD in points of AP50" in notes


def test_the_study_trains_the_papers_methods():
    setting = STUDIES["detection"].recipe(data_path="bccd")
    assert setting.methods == tuple(paper.DETECTION) and setting.nodes == 8
    assert [len(case.seeds) for case in setting.cases] >= [3, 1]
    assert {case.recipe for case in setting.cases} == {"bccd-faster-rcnn", "bccd-retinanet"}
    recipe = detection.trained(setting, setting.cases[0], "bccd", "pmsgd-lars", 1)
    assert recipe.skip_bad_boxes and recipe.hyper == (("trust", setting.lars_trust),)


def test_without_data_the_error_says_what_to_do(tmp_path: Path):
    with pytest.raises(ValueError, match=r"bccd needs --data-path.*Or try --quick"):
        detection.run(detection.recipe(), directory=tmp_path)


def test_the_page_shows_detections_beside_the_ground_truth(study: tuple[Path, Result]):
    directory, _ = study
    text = write([directory], directory / "report.html").read_text(encoding="utf-8")
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, values: tags.append((tag, dict(values)))  # type: ignore[method-assign]
    parser.feed(text)
    embedded = [values for tag, values in tags if tag == "image"]
    drawn = [values for tag, values in tags if values.get("class") == "picture"]
    assert len(embedded) == 4  # each once, whatever the number of methods
    assert all(str(values["href"]).startswith("data:image/jpeg;base64,") for values in embedded)
    spoken = [str(values["aria-label"]) for values in drawn]
    assert len(spoken) == 4 * (1 + len(METHODS))
    assert sum("ground truth" in words for words in spoken) == 4
    assert sum("DecentLaM" in words for words in spoken) == 4
    assert "img-src data:" in text and "AP50 of the averaged model" in text
    assert re.search(r"<li><span class=\"label1\"></span>disc</li>", text)


def test_a_page_about_classifiers_shows_none(tmp_path: Path):
    from tests.lab.report.written_runs import write_run

    write_run(tmp_path / "run", "dmsgd", 0)
    page = write([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="detections"' not in page and "Accuracy of the averaged model" in page
