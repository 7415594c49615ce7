"""A page about a run."""

from __future__ import annotations

from pathlib import Path

from tests.lab.commands.running import QUICK, run, run_json


def test_report_writes_a_page_beside_the_run(tmp_path: Path):
    run_json("train", *QUICK, "--out", str(tmp_path / "run"), "--quiet")
    page = Path(run_json("report", str(tmp_path / "run"))["report"])
    assert page == tmp_path / "run" / "report.html" and "decentlam" in page.read_text()
    assert f"Wrote {page}" in run("report", str(tmp_path / "run"), "--out", str(page)).output
