"""The studies of test accuracy: their rates, their tables, and their claim."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab.data.fashion_mnist import DEFAULT_PATH
from decentlam.lab.recipes import Recipe
from decentlam.lab.recipes import make as make_recipe
from decentlam.lab.studies import STUDIES, accuracy, paper
from decentlam.lab.studies.common import where
from decentlam.lab.studies.study import perform
from decentlam.lab.studies.sweep import name, sweep, train_in_place
from tests.lab.detection.boxes import draw_shapes
from tests.lab.studies.test_common import record

STUDIES_OF_ACCURACY = ("large-batch", "models", "topologies")


def test_the_fixed_setting_is_the_recipe_of_the_bias():
    setting = accuracy.large_batch()
    here = accuracy.make(setting, setting.cases[0], "decentlam", 8000, 1.0, seed=0)
    there = make_recipe("fashion-mlp", evaluate_every=20.0, log_every=50, stable="ignore")
    assert here == there
    assert (here.lr, here.momentum, here.epochs, here.nodes) == (0.05, 0.9, 20.0, 8)


@pytest.mark.system
def test_the_best_rate_of_the_first_seed_is_that_of_all(tmp_path: Path):
    setting = accuracy.large_batch(quick=True)
    fixed, _, trend = (
        replace(
            case,
            methods=("dmsgd", "decentlam"),
            base=replace(case.base, epochs=1.0, warmup_epochs=0.1),
        )
        for case in setting.cases
    )
    setting = replace(setting, cases=(fixed, trend))
    run_here(  # so that the study finds all its runs and starts no other process
        tmp_path,
        *(
            accuracy.make(setting, case, method, batch, factor, seed)
            for case in setting.cases
            for method in case.methods
            for batch in case.batches
            for factor in case.factors
            for seed in setting.seeds
        ),
    )
    result = perform(accuracy.LARGE_BATCH, setting, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    for method in trend.methods:
        for batch in trend.batches:
            mine = where(records, case=trend.name, method=method, batch=batch)
            tried = {r["lr"]: r["averaged_top1"] for r in where(mine, seed=0)}
            assert len(tried) == len(trend.factors)
            shown = {r["lr"] for r in where(mine, chosen=True)}
            assert {tried[lr] for lr in shown} == {max(tried.values())} and len(shown) == 1
            assert [r["seed"] for r in where(mine, chosen=True)] == [0, 1]
    assert [row["case"] for row in result.table] == ["fixed"] * 2 + [trend.name] * 2
    assert "76.43 / 76.19 / 76.73 / 76.22" in (tmp_path / "table.md").read_text()
    assert any("Lead over DmSGD" in note for note in result.notes)


def brief(case: accuracy.Case, epochs: float) -> Recipe:
    times = {"epochs": epochs, "warmup_epochs": epochs / 10, "evaluate_every": epochs}
    return replace(case.base, **times)


def run_here(directory: Path, *recipes: Recipe) -> None:
    for recipe in dict.fromkeys(recipes):
        train_in_place(recipe, directory / "runs" / name(recipe))


def test_a_method_that_diverges_has_its_row():
    lost = {"status": "diverged", "averaged_top1": None, "nodes_top1": None}
    records = [record(method="dmsgd"), record(**lost), record(method="decentlam-steady")]
    rows = {row["method"]: row for row in accuracy.table(records)}
    assert rows["decentlam"]["averaged,_batch_8"] == "diverges at step 9"


def test_without_the_data_the_error_says_how_to_get_it_and_how_to_do_without(tmp_path: Path):
    for study in STUDIES_OF_ACCURACY:
        setting = STUDIES[study].recipe(data_path=str(tmp_path / "nothing"))
        with pytest.raises(ValueError, match=r"apt-get install dataset-fashion-mnist.*--quick"):
            STUDIES[study].run(setting, directory=tmp_path)


def test_other_data_takes_the_place_of_fashion_mnist_and_digits_stay():
    for study in STUDIES_OF_ACCURACY:
        setting = STUDIES[study].recipe(data="cifar10", data_path="there")
        paths = {
            accuracy.make(setting, case, "dmsgd", case.batches[0], 1.0, 0).data_path
            for case in setting.cases
            if case.base.data == "cifar10"
        }
        assert paths == {"there"}
    cases = accuracy.models(data="cifar10").cases
    assert [case.base.data for case in cases] == ["cifar10", "cifar10", "digits", "digits"]


def test_the_study_of_detection_trains_the_papers_methods(tmp_path: Path):
    setting = STUDIES["detection"].recipe()
    assert [case.base.model for case in setting.cases] == ["faster-rcnn-small", "retinanet-small"]
    assert all(case.methods == tuple(paper.DETECTION[case.name]) for case in setting.cases)
    recipe = accuracy.make(setting, setting.cases[0], "pmsgd-lars", 16, 1.0, 1)
    assert recipe.hyper == (("trust", 0.1),) and (recipe.lr, recipe.nodes) == (0.05, 8)
    with pytest.raises(ValueError, match=r"bccd needs --data-path"):
        STUDIES["detection"].run(setting, directory=tmp_path)


def test_detectors_have_a_row_per_method_with_the_papers_figures(tmp_path: Path):
    setting = accuracy.detection(nodes=2, data="voc")
    shapes = str(draw_shapes(tmp_path / "shapes", train=8, test=5))
    base = replace(setting.cases[1].base, epochs=1.0, image_size=32, topology="ring")
    base = replace(base, data_path=shapes)
    case = replace(setting.cases[1], base=base, batches=(8,), methods=("dmsgd", "decentlam"))
    setting = replace(setting, cases=(case,))
    run_here(tmp_path, *(accuracy.make(setting, case, m, 8, 1.0, 0) for m in case.methods))
    result = perform(accuracy.DETECTION, setting, tmp_path)
    rows = {(row["case"], row["method"]): row for row in result.table}
    assert rows["R-Net", "decentlam"]["paper"] == "79.3 / 36.6"
    assert rows["R-Net", "dmsgd"]["paper"] == "79.1 / 36.1"
    assert {"case", "method", "AP50,_batch_8", "nodes'_AP50,_batch_8"} <= {
        key.replace(" ", "_") for key in result.table[0]
    }
    assert "AP50 and AP@[.5:.95]" in result.notes[0]


@pytest.mark.slow
@pytest.mark.skipif(not DEFAULT_PATH.exists(), reason="needs apt-get install dataset-fashion-mnist")
def test_decentlam_beats_dmsgd_on_sorted_labels_with_a_large_batch(tmp_path: Path):
    setting = accuracy.large_batch()
    recipes = [
        accuracy.make(setting, setting.cases[0], method, 8000, 1.0, seed=0)
        for method in ("decentlam", "dmsgd", "da-dmsgd", "awc-dmsgd", "qg-dmsgd")
    ]
    ours, *rivals = sweep(recipes, tmp_path)
    for theirs in rivals:
        assert ours["averaged_top1"] > theirs["averaged_top1"] + 0.03
        assert ours["nodes_top1"] > theirs["nodes_top1"] + 0.03
