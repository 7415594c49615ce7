"""A page about a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab.commands.running import QUICK, run, run_json


def test_report_takes_the_newest_run_and_lists_what_is_beside_a_wrong_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert "there is no run in out/train; run `decentlam train`" in run("report").output
    for name in ("first", "second"):
        run_json("train", *QUICK, "--out", f"out/train/{name}", "--quiet")
    os.utime("out/train/first/run.json", (1e9, 1e9))
    assert run_json("report")["report"] == "out/train/second/report.html"
    assert "Wrote page.html" in run("report", "--out", "page.html").output
    assert "decentlam" in Path("page.html").read_text()
    wrong = run("report", "out/train/third")
    assert wrong.exit_code == 2
    assert "runs beside it: out/train/first, out/train/second" in wrong.output
