"""Which runs are averaged, and which stand side by side."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from decentlam.lab.report import run_groups, write
from decentlam.lab.report.content import COLUMNS
from decentlam.lab.report.runs import read
from tests.lab.report.written_runs import (
    embedded_data,
    last_evaluation,
    only_group,
    write_run,
)


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
        assert found == pytest.approx((statistics.mean(values), statistics.stdev(values)))
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
    data = embedded_data(write([*good, bad], tmp_path / "page.html"))
    assert data["notes"] == ["1 of 3 runs diverged: shown, but in no average."]
    assert data["groups"][0]["cells"][0][1] == "2 of 3 runs"
    lines = data["charts"][0]["lines"]
    assert [(line["name"], line["diverged"]) for line in lines] == [
        ("", False),
        ("seed 2, diverged", True),
    ]


def test_a_method_that_always_diverged_has_no_numbers(tmp_path: Path):
    runs = [
        write_run(tmp_path / "a", "dmsgd", status="diverged", until=6),
        write_run(tmp_path / "b"),
    ]
    lost, _ = embedded_data(write(runs, tmp_path / "page.html"))["groups"]
    assert [text for text, _ in lost["cells"]] == ["diverged", *["–"] * 4]


def test_an_unfinished_run_is_not_mixed_with_finished_ones(tmp_path: Path):
    done = write_run(tmp_path / "a", seed=0)
    going = write_run(tmp_path / "b", seed=1, status="interrupted", until=4)
    assert COLUMNS[0].value(only_group([done, going])) == COLUMNS[0].value(only_group([done]))
    assert only_group([done, going]).status() == "1 finished, 1 interrupted at step 56"


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
    settings = run_groups.collect(runs)
    assert [setting.label for setting in settings] == ["batch 1024", "batch 8192"]
    labels = [f"{group.label}, {group.detail}" for group in settings[0].groups]
    assert labels == ["DmSGD, lr 0.1", "DmSGD, lr 0.2", "DecentLaM, lr 0.1", "DecentLaM, lr 0.2"]
    indices = [group.index for setting in settings for group in setting.groups]
    assert indices == list(range(8))
    one_rate = run_groups.collect([run for run in runs if run.recipe["lr"] in (0.1, 0.8)])
    assert [group.detail for group in one_rate[0].groups] == ["", ""]


def test_one_method_on_many_networks_is_one_table(tmp_path: Path):
    runs = [read(write_run(tmp_path / name, topology=name)) for name in ("ring", "mesh", "star")]
    (setting,) = run_groups.collect(runs)
    assert [group.detail for group in setting.groups] == ["mesh", "ring", "star"]
