"""What a report reads of run directories."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from decentlam.lab.report import write
from decentlam.lab.report.runs import find, read
from tests.lab.report.written_runs import embedded_data, write_run


def test_what_is_not_a_run_directory_is_refused_with_what_is_needed(tmp_path: Path):
    with pytest.raises(ValueError, match="at least one run directory"):
        write([], tmp_path / "page.html")
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
    assert "is not a record and was left out" in page and "no end record" in page
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
    data = embedded_data(write([run], tmp_path / "page.html"))
    assert "there is no records.jsonl" in data["notes"][0]


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
