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
    changes = {"methods": ("dmsgd", "decentlam"), "epochs": 1.0}
    fixed, _, trend = (replace(case, **changes) for case in setting.cases)
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
    assert {"accuracy.png", "accuracy.svg"} <= {path.name for path in result.files}


def run_here(directory: Path, *recipes: Recipe) -> None:
    for recipe in dict.fromkeys(recipes):
        train_in_place(recipe, directory / "runs" / name(recipe))


@pytest.mark.system
def test_a_small_study_writes_a_row_per_method_and_no_more_runs_than_it_needs(tmp_path: Path):
    setting = accuracy.topologies(quick=True)
    cases = [
        case for case in setting.cases if case.name in ("all-reduce", "bipartite-random-match")
    ]
    cases = [replace(case, epochs=0.2, batches=case.batches[:1]) for case in cases]
    setting = replace(setting, cases=tuple(cases), seeds=(0,))
    jobs = [(case, method) for case in setting.cases for method in case.methods]
    recipes = [accuracy.make(setting, *job, job[0].batches[0], 1.0, 0) for job in jobs]
    run_here(tmp_path, *recipes)
    result = perform(accuracy.TOPOLOGIES, setting, tmp_path)
    assert [(row["case"], row["method"]) for row in result.table] == [(c.name, m) for c, m in jobs]
    assert len(list((tmp_path / "runs").iterdir())) == len(recipes)


def test_a_method_that_diverges_has_its_row_and_its_place_in_the_figure():
    lost = {"status": "diverged", "averaged_top1": None, "nodes_top1": None}
    records = [record(method="dmsgd"), record(**lost), record(method="decentlam-steady")]
    rows = {row["method"]: row for row in accuracy.table(records)}
    assert rows["decentlam"]["averaged,_batch_8"] == "diverges at step 9"
    texts = [t.get_text() for t in accuracy.figures(records)["accuracy"].axes[0].texts]
    assert texts == ["DecentLaM diverges"]


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
            if case.data == "cifar10"
        }
        assert paths == {"there"}
    cases = accuracy.models(data="cifar10").cases
    assert [case.data for case in cases] == ["cifar10", "cifar10", "digits", "digits"]


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


def test_the_papers_tables_agree_with_each_other():
    ours = paper.IMAGENET["decentlam"]
    assert paper.TOPOLOGIES["symmetric-exponential"] == {b: ours[b] for b in ("16K", "32K")}
    for row in paper.IMAGENET.values():
        assert all(value <= ours[batch] for batch, value in row.items())
