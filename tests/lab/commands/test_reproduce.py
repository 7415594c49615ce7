"""Studies from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decentlam.lab.studies import regression
from decentlam.lab.values import plain
from tests.lab.commands.running import PNG, run_json


@pytest.mark.system
def test_reproduce_writes_recipe_records_table_and_figures_and_prints_only_json(tmp_path: Path):
    options = ("--quick", "--seed", "2", "--out", str(tmp_path))
    found = run_json("reproduce", "regression", *options)
    assert {row["method"] for row in found["table"]} == set(regression.Regression.methods)
    assert {Path(name) for name in found["files"]} == set(tmp_path.iterdir())
    described = json.loads((tmp_path / "recipe.json").read_text())
    assert described["recipe"]["seed"] == 2
    assert {"torch", "numpy", "decentlam", "commit"} <= described["versions"].keys()
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert records == plain(regression.run(regression.recipe(seed=2, quick=True)))
    assert "| dsgd " in (tmp_path / "table.md").read_text()
    for name in ("methods", "figure3"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
        assert (tmp_path / f"{name}.svg").stat().st_size > 0
