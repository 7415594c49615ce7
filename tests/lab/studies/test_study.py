"""What a study writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from decentlam.lab.studies import STUDIES
from decentlam.lab.studies.study import markdown, perform, plain

PNG = b"\x89PNG\r\n"


@pytest.mark.system
def test_a_run_directory_holds_recipe_records_table_and_figures(tmp_path: Path):
    study = STUDIES["regression"]
    recipe = dataclasses.replace(study.recipe(seed=2), methods=("dsgd", "decentlam"), steps=60)
    result = perform(study, recipe, tmp_path)
    names = {path.name for path in result.files}
    assert {"recipe.json", "records.jsonl", "table.md", "figure3.png", "methods.svg"} <= names
    described = json.loads((tmp_path / "recipe.json").read_text())
    assert described["recipe"]["seed"] == 2
    assert {"torch", "numpy", "decentlam", "commit"} <= described["versions"].keys()
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert records == plain(study.run(recipe, lambda *_: None))
    assert (tmp_path / "methods.png").read_bytes().startswith(PNG)
    assert "| dsgd |" in (tmp_path / "table.md").read_text()


def test_helpers():
    assert markdown([{"a_b": 1.23456, "c": None}]) == "| a b | c |\n| --- | --- |\n| 1.235 | - |\n"
    assert plain({"x": (float("nan"), 1)}) == {"x": [None, 1]}
