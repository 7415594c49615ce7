"""The report of training runs: what is read, and what is averaged."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
from written_runs import (
    EPOCHS,
    STEPS_PER_EPOCH,
    embedded_data,
    last_evaluation,
    only_group,
    write_run,
)

from decentlam.lab.recipes import Recipe
from decentlam.lab.report import curves, groups, text, write
from decentlam.lab.report.runs import find, read
from decentlam.lab.report.table import COLUMNS

# What is read ------------------------------------------------------------------------------------


def test_what_is_not_a_run_directory_is_refused_with_what_is_needed(tmp_path: Path):
    with pytest.raises(ValueError, match="at least one run directory"):
        write([], tmp_path / "page.html")
    with pytest.raises(ValueError, match="there is no directory"):
        write([tmp_path / "nowhere"], tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"neither run\.json nor runs/\*/run\.json"):
        write([tmp_path], tmp_path / "page.html")
    run = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match=re.escape(f"try {tmp_path}/*")):
        write([tmp_path], tmp_path / "page.html")
    with pytest.raises(ValueError, match="is a directory; give a file name"):
        write([run], tmp_path)
    (run / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="no recipe with a method"):
        write([run], tmp_path / "page.html")
    for damaged in ("{", "[" * 100_000):
        (run / "run.json").write_text(damaged)
        with pytest.raises(ValueError, match="is not JSON"):
            write([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_study_is_all_its_runs_and_every_run_counts_once(tmp_path: Path):
    first = write_run(tmp_path / "runs" / "a", seed=0)
    second = write_run(tmp_path / "runs" / "deeper" / "b", seed=1)
    assert find([tmp_path]) == [first, second]
    assert find([first, tmp_path, second]) == [first, second]


def test_a_torn_last_line_is_left_out_with_a_note(tmp_path: Path):
    run = write_run(tmp_path / "run", status=None, until=3)
    before = read(run)
    with open(run / "records.jsonl", "a") as file:
        file.write('{"kind": "evaluation", "step": 99, "averaged_to')
    after = read(run)
    assert (after.steps, after.evaluations) == (before.steps, before.evaluations)
    assert after.status == "unfinished"
    page = write([run], tmp_path / "page.html").read_text()
    assert "ends in the middle of a line" in page and "no end record" in page
    assert "at epoch 3 of 12" in page


def test_a_line_that_is_no_record_is_left_out_with_its_number(tmp_path: Path):
    run = write_run(tmp_path / "run")
    lines = (run / "records.jsonl").read_text().splitlines()
    (run / "records.jsonl").write_text("\n".join([*lines[:4], "[1]", *lines[4:]]) + "\n")
    found = read(run)
    assert found.notes == ("line 5 of records.jsonl is not a record and was left out",)
    assert found.status == "finished"


def test_a_run_without_records_is_read_with_a_note(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "records.jsonl").unlink()
    page = write([run], tmp_path / "page.html").read_text()
    assert "there is no records.jsonl" in page and "No step was timed" in page


def test_steps_that_a_resumed_run_did_again_count_once(tmp_path: Path):
    run = write_run(tmp_path / "run")
    whole = read(run)
    lines = (run / "records.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line).get("epoch", 0) > 7)
    end = json.dumps({"kind": "end", "step": 98, "status": "interrupted", "seconds": 1.0})
    again = lines[at - 9 :]
    (run / "records.jsonl").write_text("\n".join([*lines[:at], end, *again]) + "\n")
    resumed = read(run)
    assert (resumed.steps, resumed.evaluations) == (whole.steps, whole.evaluations)
    assert resumed.status == "finished"


# What is averaged --------------------------------------------------------------------------------


def test_runs_that_differ_only_in_the_seed_are_averaged(tmp_path: Path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(4)]
    group = only_group(runs)
    last = [last_evaluation(run) for run in runs]
    for column, key in zip(
        COLUMNS, ("averaged_top1", "nodes_top1", "consensus_distance"), strict=False
    ):
        values = [evaluation[key] for evaluation in last]
        found = column.value(group)
        assert found is not None
        assert found.mean == pytest.approx(statistics.mean(values))
        assert found.deviation == pytest.approx(statistics.stdev(values))
    low = 100 * min(evaluation["nodes_top1_min"] for evaluation in last)
    high = 100 * max(evaluation["nodes_top1_max"] for evaluation in last)
    assert COLUMNS[1].below(group) == f"{low:.2f} to {high:.2f}"
    assert group.status() == "finished"


def test_a_diverged_run_is_shown_and_in_no_average(tmp_path: Path):
    good = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    bad = write_run(tmp_path / "bad", seed=2, status="diverged", until=5)
    alone, group = only_group(good), only_group([*good, bad])
    for column in COLUMNS:
        assert column.value(group) == column.value(alone)
    assert group.status() == "2 finished, 1 diverged at step 70"
    page = write([*good, bad], tmp_path / "page.html")
    assert "2 of 3 runs" in page.read_text() and "1 of 3 runs diverged" in page.read_text()
    lines = embedded_data(page)["charts"][0]["lines"]
    assert [(line["name"], line["diverged"]) for line in lines] == [
        ("", False),
        ("seed 2, diverged", True),
    ]


def test_a_method_that_always_diverged_has_no_numbers_and_is_never_the_best(tmp_path: Path):
    runs = [
        write_run(tmp_path / "a", "dmsgd", status="diverged", until=6),
        write_run(tmp_path / "b"),
    ]
    page = write(runs, tmp_path / "page.html").read_text()
    row = page.split('<tr data-group="0">')[1].split("</tr>")[0]
    assert 'data-value="">diverged</td>' in row and "★" not in row


def test_an_unfinished_run_is_not_mixed_with_finished_ones(tmp_path: Path):
    done = write_run(tmp_path / "a", seed=0)
    going = write_run(tmp_path / "b", seed=1, status="interrupted", until=4)
    assert COLUMNS[0].value(only_group([done, going])) == COLUMNS[0].value(only_group([done]))
    assert only_group([done, going]).status() == "1 finished, 1 interrupted at step 56"


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
    assert text.spread([0.5, None]) is None


def test_curves_are_the_mean_and_the_range_of_the_seeds(tmp_path: Path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    charts = {c["name"]: c for c in embedded_data(write(runs, tmp_path / "page.html"))["charts"]}
    assert list(charts) == [chart.name for chart in curves.CHARTS]
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


def test_other_problems_are_other_settings_and_other_rates_are_other_rows(tmp_path: Path):
    runs = [
        read(
            write_run(
                tmp_path / f"{method}-{batch}-{lr}", method, batch=batch, lr=lr * batch / 1024
            )
        )
        for method in ("dmsgd", "decentlam")
        for batch in (1024, 8192)
        for lr in (0.1, 0.2)
    ]
    settings = groups.collect(runs)
    assert [setting.label for setting in settings] == ["batch 1024", "batch 8192"]
    labels = [f"{group.label}, {group.detail}" for group in settings[0].groups]
    assert labels == ["DmSGD, lr 0.1", "DmSGD, lr 0.2", "DecentLaM, lr 0.1", "DecentLaM, lr 0.2"]
    indices = [group.index for setting in settings for group in setting.groups]
    assert indices == list(range(8))
    one_rate = groups.collect([run for run in runs if run.recipe["lr"] in (0.1, 0.8)])
    assert [setting.detail for setting in one_rate] == ["lr 0.1", "lr 0.8"]
    assert [group.detail for group in one_rate[0].groups] == ["", ""]


def test_a_field_that_an_older_run_lacks_is_at_its_default(tmp_path: Path):
    old = write_run(tmp_path / "old", seed=0)
    new = write_run(tmp_path / "new", seed=1, log_every=Recipe().log_every)
    other = write_run(tmp_path / "other", seed=1, log_every=Recipe().log_every + 1)
    assert len(only_group([old, new]).runs) == 2
    (setting,) = groups.collect([read(run) for run in (old, new, other)])
    assert [group.detail for group in setting.groups] == ["log every 10", "log every 11"]


def test_one_method_on_many_networks_is_one_table(tmp_path: Path):
    runs = [read(write_run(tmp_path / name, topology=name)) for name in ("ring", "mesh", "star")]
    (setting,) = groups.collect(runs)
    assert [group.detail for group in setting.groups] == ["mesh", "ring", "star"]
