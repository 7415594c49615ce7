"""The large-batch study: its rates, its fixed setting, its claim."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab import plot_style
from decentlam.lab.data.fashion_mnist import DEFAULT_PATH
from decentlam.lab.recipes import make
from decentlam.lab.studies import large_batch
from decentlam.lab.studies.common import where
from decentlam.lab.studies.study import perform
from decentlam.lab.studies.sweep import name, sweep, train_in_place


def test_the_fixed_setting_is_the_recipe_of_the_bias():
    here = large_batch.make(
        large_batch.recipe(), "decentlam", "label-sorted:2", 8000, 1.0, seed=0, fixed=True
    )
    there = make(
        "fashion-mlp", evaluate_every=20.0, log_every=50, stable="ignore", batch_norm="estimate"
    )
    assert here == there
    assert (here.lr, here.momentum, here.epochs, here.nodes) == (0.05, 0.9, 20.0, 8)


@pytest.mark.system
def test_large_batch_chooses_the_best_rate_of_the_first_seed_for_all(tmp_path: Path):
    setting = replace(
        large_batch.recipe(quick=True),
        methods=("dmsgd", "decentlam"),
        shards=("label-sorted:2",),
        epochs=1.0,
        fixed_epochs=1.0,
    )
    # In this process, so that the study finds all its runs and starts no others.
    worker_runs(setting, tmp_path)
    result = perform(large_batch.STUDY, setting, tmp_path)
    assert {"accuracy.png", "lead.png", "fixed.svg"} <= {path.name for path in result.files}
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    trend = where(records, part="trend")
    for method in setting.methods:
        for batch in setting.batches:
            mine = where(trend, method=method, batch=batch)
            tried = {r["lr"]: r["averaged_top1"] for r in where(mine, seed=0)}
            assert len(tried) == len(setting.factors)
            shown = {r["lr"] for r in where(mine, chosen=True)}
            assert {tried[lr] for lr in shown} == {max(tried.values())} and len(shown) == 1
            assert [r["seed"] for r in where(mine, chosen=True)] == [0, 1]
    assert [row["part"] for row in result.table] == ["fixed"] * 2 + ["trend"] * 2
    assert "76.43 / 76.19 / 76.73 / 76.22" in (tmp_path / "table.md").read_text()
    assert any("lead over DmSGD" in note for note in result.notes)


def worker_runs(setting: large_batch.LargeBatch, directory: Path) -> None:
    recipes = [
        large_batch.make(setting, method, "label-sorted:2", batch, factor, seed, fixed)
        for method in setting.methods
        for batch in setting.batches
        for factor in setting.factors
        for seed in setting.seeds
        for fixed in (False, True)
        if not fixed or (batch == setting.batches[-1] and factor == 1.0)
    ]
    unique = {name(recipe): recipe for recipe in recipes}
    for recipe in unique.values():
        train_in_place(recipe, directory / "runs" / name(recipe))


def test_every_method_of_the_studies_has_a_look():
    for method in (*large_batch.LargeBatch().methods, "decentlam-steady"):
        assert plot_style.both(method)["color"] and plot_style.label(method)


@pytest.mark.slow
@pytest.mark.skipif(not DEFAULT_PATH.exists(), reason="needs apt-get install dataset-fashion-mnist")
def test_decentlam_beats_dmsgd_on_sorted_labels_with_a_large_batch(tmp_path: Path):
    setting = large_batch.recipe()
    recipes = [
        large_batch.make(setting, method, "label-sorted:2", 8000, 1.0, seed=0, fixed=True)
        for method in ("decentlam", "dmsgd", "da-dmsgd", "awc-dmsgd", "qg-dmsgd")
    ]
    ours, *rivals = sweep(recipes, tmp_path)
    for theirs in rivals:
        assert ours["averaged_top1"] > theirs["averaged_top1"] + 0.03
        assert ours["nodes_top1"] > theirs["nodes_top1"] + 0.03
