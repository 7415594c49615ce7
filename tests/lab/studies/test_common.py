"""Accuracies over seeds, and what all studies that train do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab.studies import STUDIES, models, topologies
from decentlam.lab.studies.common import cell, leads, mean_and_spread, signed, verdict
from decentlam.lab.studies.study import Record, perform
from decentlam.lab.studies.sweep import name, train_in_place


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
        train_in_place(recipe, tmp_path / "runs" / name(recipe))
    result = perform(STUDIES[study], setting, tmp_path)
    assert len(result.table) == rows
    assert (tmp_path / f"{study}.png").exists()
    written = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {r["run"] for r in written} == {name(recipe) for recipe in recipes}
    assert len(list((tmp_path / "runs").iterdir())) == len(recipes)  # no more than was needed
