"""A page about a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab.commands.running import QUICK, run, run_json


def test_report_writes_a_page_beside_the_run(tmp_path: Path):
    run_json("train", *QUICK, "--out", str(tmp_path / "run"), "--quiet")
    page = Path(run_json("report", str(tmp_path / "run"))["report"])
    assert page == tmp_path / "run" / "report.html" and "decentlam" in page.read_text()
    assert f"Wrote {page}" in run("report", str(tmp_path / "run"), "--out", str(page)).output


def test_report_takes_the_newest_run_and_lists_what_is_beside_a_wrong_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert "there is no run in out/train; run `decentlam train`" in run("report").output
    for name in ("first", "second"):
        run_json("train", *QUICK, "--out", f"out/train/{name}", "--quiet")
    os.utime("out/train/first/run.json", (1e9, 1e9))
    assert run_json("report")["report"] == "out/train/second/report.html"
    wrong = run("report", "out/train/third")
    assert wrong.exit_code == 2
    assert "runs beside it: out/train/first, out/train/second" in wrong.output
