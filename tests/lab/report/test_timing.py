"""Where the time of a step goes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from decentlam.lab.report import (
    timing,
)
from decentlam.lab.report.table import COLUMNS
from tests.lab.report.written_runs import (
    METHODS,
    only_group,
    write_run,
)


def test_the_parts_of_a_step_sum_to_the_step(tmp_path: Path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"][1:]  # without the warm-up
    found = timing.split(only_group([run]))
    assert found is not None
    assert sum(found.values()) == pytest.approx(statistics.mean(r["step_seconds"] for r in steps))
    assert found["data"] == pytest.approx(statistics.mean(r["data_seconds"] for r in steps))
    assert found["other"] > 0


def test_simulated_nodes_do_not_wait(tmp_path: Path):
    column = COLUMNS[-1]
    assert column.value(only_group([write_run(tmp_path / "a", simulated=True)])) is None
    real = column.value(only_group([write_run(tmp_path / "b", simulated=False)]))
    assert real is not None and real.mean == pytest.approx(METHODS["decentlam"][2])
