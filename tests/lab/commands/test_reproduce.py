"""Studies from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentlam.lab.studies.regression import Regression
from tests.lab.commands.running import PNG, run_json


@pytest.mark.system
def test_reproduce_writes_a_run_directory_and_prints_only_json(tmp_path: Path):
    found = run_json("reproduce", "regression", "--quick", "--out", str(tmp_path / "run"))
    assert {row["method"] for row in found["table"]} == set(Regression.methods)
    for name in found["files"]:
        assert Path(name).stat().st_size > 0
    pictures = [Path(name) for name in found["files"] if name.endswith(".png")]
    assert len(pictures) == 2
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)
