"""The study of unlike data: its trainings, its table, and that it continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab.studies import unlike

SMALL = replace(unlike.SETTINGS[0], data="digits", batch=80, nodes=4, rates=(0.1, 0.4))
STUDY = unlike.Unlike((SMALL,), (("pmsgd", None), ("decentlam-exact", unlike.TWO)), seeds=(0, 1))


def test_the_study_shows_the_best_rate_and_repeats_nothing(tmp_path: Path) -> None:
    records = unlike.run(STUDY, directory=tmp_path)
    for method, _ in STUDY.methods:
        mine = [r for r in records if r["method"] == method]
        best = max((r for r in mine if r["seed"] == 0), key=lambda r: r["averaged_top1"])
        assert {r["lr"] for r in mine if r["chosen"]} == {best["lr"]}
        assert len(mine) == 3 and sum(r["chosen"] for r in mine) == 2
    before = (tmp_path / "runs.jsonl").read_text()
    assert unlike.run(STUDY, directory=tmp_path) == records
    assert (tmp_path / "runs.jsonl").read_text() == before
    (row,) = unlike.table(records)
    assert row["network"] == "bipartite-random-match"
    assert {"pmsgd", "decentlam-exact, two pairs"} <= row.keys()


def test_all_nodes_of_pmsgd_agree() -> None:
    found = unlike.train(SMALL, "pmsgd", None, 0.1, 0, STUDY)
    assert found["averaged_top1"] == pytest.approx(found["nodes_top1"])
    assert found["averaged_top1"] > 0.5


def test_data_it_is_not_about_is_refused() -> None:
    with pytest.raises(ValueError, match="fashion-mnist and cifar10; got digits"):
        unlike.recipe(data="digits")
    assert all(s.data != "cifar10" for s in unlike.recipe().settings)
    assert len(unlike.recipe(data_path="there").settings) == 13
