"""What the page says, and that text of a run stays text."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentlam.lab.report import write
from decentlam.lab.report.content import COLUMNS
from tests.lab.report.written_runs import (
    METHODS,
    only_group,
    write_run,
)


def test_the_same_runs_give_the_same_bytes(tmp_path: Path):
    runs = [write_run(tmp_path / method, method) for method in METHODS]
    first, second = tmp_path / "new" / "1.html", tmp_path / "2.html"
    assert write(runs, first).read_bytes() == write(runs[::-1], second).read_bytes()


def test_simulated_nodes_do_not_wait(tmp_path: Path):
    wait = COLUMNS[-1].value
    assert wait(only_group([write_run(tmp_path / "a", simulated=True)])) is None
    real = wait(only_group([write_run(tmp_path / "b", simulated=False)]))
    assert real is not None and real[0] == pytest.approx(METHODS["decentlam"][2])
