"""The studies that train: runs that are never lost or repeated, and tables that say what was."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab import style, worker
from decentlam.lab.accuracy import cell, leads, mean_and_spread, signed, verdict, where
from decentlam.lab.data.fashion_mnist import DEFAULT_PATH
from decentlam.lab.recipes import Recipe, fashion_mlp
from decentlam.lab.studies import STUDIES, large_batch, models, paper, topologies
from decentlam.lab.study import Record, perform
from decentlam.lab.sweep import name, outcome, sweep
from decentlam.lab.train import Stop, train

TINY = Recipe(nodes=4, batch=64, epochs=0.2, evaluate_every=0.2, stable="ignore")


class Ticks(list[tuple[int, int, str]]):
    def __call__(self, done: int, total: int, what: str) -> None:
        self.append((done, total, what))


def stamp(directory: Path) -> list[int]:
    return [file.stat().st_mtime_ns for file in sorted(directory.glob("runs/*/records.jsonl"))]


def test_a_sweep_says_how_long_and_repeats_only_what_is_not_over_or_was_another_run(tmp_path: Path):
    recipes = [replace(TINY, method=method) for method in ("dmsgd", "decentlam")]
    ticks = Ticks()
    found = sweep(recipes, tmp_path, ticks, jobs=1)
    assert [r["method"] for r in found] == ["dmsgd", "decentlam"]
    assert "2 runs, about " in ticks[0][2] and ticks[0][:2] == (0, 2)
    assert ticks[-1] == (2, 2, "done")
    assert not list(tmp_path.glob("runs/*/checkpoint"))
    before = stamp(tmp_path)
    assert sweep(recipes, tmp_path, jobs=1) == found
    assert stamp(tmp_path) == before
    # The same names, but another momentum: these runs are not those.
    others = [replace(recipe, momentum=0.5) for recipe in recipes]
    changed = sweep(others, tmp_path, jobs=1)
    assert all(new > old for new, old in zip(stamp(tmp_path), before, strict=True))
    assert [r["averaged_top1"] for r in changed] != [r["averaged_top1"] for r in found]
    with pytest.raises(ValueError, match="names do not say"):
        sweep([TINY, replace(TINY, momentum=0.5)], tmp_path, jobs=1)


def test_an_interrupted_run_is_continued_and_ends_as_if_it_had_not_been(tmp_path: Path):
    place = tmp_path / "runs" / name(TINY)
    stop = Stop()
    stop.requested = True
    assert train(TINY, place, simulate=True, stop=stop).status == "interrupted"
    assert outcome(TINY, place) is None
    (continued,) = sweep([TINY], tmp_path, jobs=1)
    (whole,) = sweep([TINY], tmp_path / "whole", jobs=1)
    assert continued | {"seconds": 0} == whole | {"seconds": 0}
    # A run that was cut off without a checkpoint, in the middle of a line, starts again.
    (place / "records.jsonl").write_text('{"kind": "st')
    assert sweep([TINY], tmp_path, jobs=1)[0] | {"seconds": 0} == whole | {"seconds": 0}


@pytest.mark.system
@pytest.mark.parametrize("what", ["killed", pytest.param("interrupted", marks=pytest.mark.slow)])
def test_processes_that_die_or_are_stopped_end_the_sweep_and_the_next_finishes(
    tmp_path: Path, what: str
):
    recipes = [replace(TINY, seed=seed) for seed in range(3)]

    def strike(done: int, total: int, doing: str) -> None:
        if "about" in doing and what == "killed":
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        if done == 1 and what == "interrupted":
            raise KeyboardInterrupt

    expected = ChildProcessError if what == "killed" else KeyboardInterrupt
    with pytest.raises(expected, match="the same command continues" if what == "killed" else None):
        sweep(recipes, tmp_path, strike, jobs=2)
    assert not multiprocessing.active_children()
    found = sweep(recipes, tmp_path, jobs=1)
    assert [r["status"] for r in found] == ["finished"] * 3


def test_without_the_data_the_error_says_how_to_get_it_and_how_to_do_without(tmp_path: Path):
    for study in ("large-batch", "models", "topologies"):
        setting = STUDIES[study].recipe(data_path=str(tmp_path / "nothing"))
        with pytest.raises(ValueError, match=r"apt-get install dataset-fashion-mnist.*--quick"):
            STUDIES[study].run(setting, directory=tmp_path)


def test_other_data_takes_the_place_of_fashion_mnist_and_digits_stay(tmp_path: Path):
    for study in ("large-batch", "topologies"):
        setting = STUDIES[study].recipe(data="cifar10", data_path=str(tmp_path))
        assert (setting.data, setting.data_path) == ("cifar10", str(tmp_path))
    cases = STUDIES["models"].recipe(data="cifar10").cases
    assert [case.data for case in cases] == ["cifar10", "cifar10", "digits", "digits"]
    with pytest.raises(ValueError, match="cifar-10-batches-py"):
        STUDIES["models"].run(STUDIES["models"].recipe(data="cifar10"), directory=tmp_path)


def test_the_fixed_setting_is_the_recipe_of_the_bias():
    here = large_batch.make(
        large_batch.recipe(), "decentlam", "label-sorted:2", 8000, 1.0, seed=0, fixed=True
    )
    there = fashion_mlp(evaluate_every=20.0, log_every=50, stable="ignore", batch_norm="estimate")
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
        worker.run(recipe, directory / "runs" / name(recipe))


@pytest.mark.system
@pytest.mark.parametrize("study", ["models", "topologies"])
def test_a_small_study_writes_a_row_per_method_and_a_figure(tmp_path: Path, study: str):
    setting = STUDIES[study].recipe(quick=True)
    if study == "models":
        setting = replace(
            setting,
            cases=tuple(replace(case, epochs=0.2, batches=(64, 128)) for case in setting.cases),
            methods=("dmsgd", "decentlam"),
            seeds=(0,),
        )
        recipes = [
            models.make(setting, case, method, batch, 0)
            for case in setting.cases
            for method in setting.methods
            for batch in case.batches
        ]
        rows = 4
    else:
        setting = replace(
            setting,
            topologies=("ring", "bipartite-random-match"),
            epochs=0.2,
            batches=(64,),
            seeds=(0,),
        )
        pairs = [(m, t) for t in setting.topologies for m in setting.methods]
        pairs += [("pmsgd", "ring"), ("decentlam-steady", "bipartite-random-match")]
        recipes = [topologies.make(setting, *pair, 64, 0) for pair in pairs]
        rows = len(pairs)
    for recipe in recipes:
        worker.run(recipe, tmp_path / "runs" / name(recipe))
    result = perform(STUDIES[study], setting, tmp_path)
    assert len(result.table) == rows
    assert (tmp_path / f"{study}.png").exists()
    written = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {r["run"] for r in written} == {name(recipe) for recipe in recipes}
    assert len(list((tmp_path / "runs").iterdir())) == len(recipes)  # no more than was needed


def record(**values: object) -> Record:
    return {
        "method": "decentlam",
        "model": "mlp",
        "data": "digits",
        "shards": "iid",
        "topology": "ring",
        "batch": 8,
        "lr": 0.1,
        "seed": 0,
        "status": "finished",
        "step": 9,
        "averaged_top1": 0.5,
        "nodes_top1": 0.25,
        "growth": 0.9,
        **values,
    }


def test_cells_leads_and_verdicts():
    runs = [record(seed=s, averaged_top1=0.5 + s / 100) for s in range(3)]
    assert mean_and_spread([50.0, 51.0, 52.0]) == (51.0, 1.0)
    assert cell(runs) == "51.00 ± 1.00"
    assert cell(runs[:1]) == "50.00"
    assert cell([]) is None
    lost = record(averaged_top1=None, nodes_top1=None, status="diverged", step=5)
    assert cell([lost, lost | {"step": 7}]) == "diverges at step 5 to 7"
    assert cell([*runs[:2], lost]) == "50.50 ± 0.71, 1 of 3 diverge"
    others = [record(method="dmsgd", seed=s, averaged_top1=0.4) for s in (0, 2)]
    found = leads([*runs, *others, lost | {"method": "dmsgd", "seed": 1}], "decentlam", "dmsgd")
    assert found == pytest.approx([10.0, 12.0])
    assert signed(found) == "+11.00 ± 1.41"
    assert signed([]) == "none to compare"
    assert verdict([1.0, 2.0], [5.0, 6.0]) == "grows"
    assert verdict([5.0, 6.0], [1.0, 2.0]) == "shrinks"
    assert verdict([1.0, 2.0], [2.0, 3.0]) == "stays within the spread"
    assert verdict([], [1.0]) == "cannot be told"


def test_a_method_that_diverges_has_its_row_and_its_place_in_the_figure():
    lost = {"status": "diverged", "averaged_top1": None, "nodes_top1": None, "growth": 1.066}
    match = "bipartite-random-match"
    records = [
        record(topology=match, method="dmsgd"),
        record(topology=match, **lost),
        record(topology=match, method="decentlam-steady"),
    ]
    rows = {row["method"]: row for row in topologies.table(records)}
    assert rows["decentlam"]["averaged,_batch_8"] == "diverges at step 9"
    setting = replace(topologies.recipe(quick=True), batches=(8,), topologies=(match,))
    notes = " ".join(topologies.notes(setting, records))
    assert "decentlam on bipartite-random-match multiplies the disagreement by 1.066" in notes
    assert "1 of 1 runs end in numbers that are not finite" in notes
    texts = [t.get_text() for t in topologies.figures(records)["topologies"].axes[0].texts]
    assert texts == ["DecentLaM diverges"]


def test_the_papers_tables_agree_with_each_other():
    for method, row in paper.MODELS["resnet50"].items():
        assert row == {batch: round(paper.IMAGENET[method][batch], 1) for batch in row}
    ours = paper.IMAGENET["decentlam"]
    assert paper.TOPOLOGIES["symmetric-exponential"] == {b: ours[b] for b in ("16K", "32K")}
    for row in paper.IMAGENET.values():
        assert all(value <= ours[batch] for batch, value in row.items())


def test_every_method_of_the_studies_has_a_look():
    for method in (*large_batch.LargeBatch().methods, "decentlam-steady"):
        assert style.both(method)["color"] and style.label(method)


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
