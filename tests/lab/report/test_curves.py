"""The numbers that curves are drawn from."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from decentlam.lab import formatting
from decentlam.lab.report import curves, write
from tests.lab.report.written_runs import (
    EPOCHS,
    STEPS_PER_EPOCH,
    embedded_data,
    last_evaluation,
    write_run,
)


def test_a_missing_value_leaves_a_gap_and_not_another_mean(tmp_path: Path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    lines = [json.loads(line) for line in (runs[0] / "records.jsonl").read_text().splitlines()]
    for record in lines:
        if record["kind"] == "evaluation" and record["step"] == 5 * STEPS_PER_EPOCH:
            record["averaged_top1"] = None
    (runs[0] / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    chart = embedded_data(write(runs, tmp_path / "page.html"))["charts"][0]
    (line,) = chart["lines"]
    assert [x for x, y in zip(line["x"], line["y"], strict=True) if y is None] == [5]
    assert formatting.spread([0.5, None]) is None


def test_curves_are_the_mean_and_the_range_of_the_seeds(tmp_path: Path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    charts = {c["name"]: c for c in embedded_data(write(runs, tmp_path / "page.html"))["charts"]}
    assert list(charts) == ["averaged", "nodes", "consensus_distance", "loss", "lr"]
    last = [last_evaluation(run) for run in runs]
    (averaged,), (nodes,) = charts["averaged"]["lines"], charts["nodes"]["lines"]
    values = [100 * evaluation["averaged_top1"] for evaluation in last]
    assert averaged["x"] == list(range(EPOCHS + 1))
    assert averaged["y"][-1] == pytest.approx(statistics.mean(values), rel=1e-5)
    assert averaged["low"][-1] == pytest.approx(min(values), rel=1e-5)
    assert averaged["high"][-1] == pytest.approx(max(values), rel=1e-5)
    worst = 100 * min(evaluation["nodes_top1_min"] for evaluation in last)
    assert nodes["low"][-1] == pytest.approx(worst, rel=1e-5)


def test_long_curves_are_thinned_without_changing_their_mean():
    records = [{"kind": "step", "step": k, "epoch": k / 100, "loss": float(k)} for k in range(1200)]
    thinned = curves._thinned(records, "loss", 3)
    assert len(thinned) == 400
    assert statistics.mean(r["loss"] for r in thinned) == pytest.approx(599.5)
    assert thinned[0]["step"] == 2 and thinned[0]["loss"] == 1.0
