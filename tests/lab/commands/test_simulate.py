"""One run of a method from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.commands.running import run, run_json


def test_simulate_prints_the_closed_form_beside_the_result(tmp_path: Path):
    picture = tmp_path / "curve.svg"
    found = run_json("simulate", "decentlam", "ring", "-n", "4", "--out", str(picture))
    assert found["final_error"] == pytest.approx(found["closed_form"], rel=1e-6)
    assert picture.read_text().startswith("<?xml")


def test_simulate_warns_of_divergence():
    unstable = ("simulate", "decentlam", "bipartite-random-match", "--momentum", "0.9")
    assert "multiplies the disagreement by 1." in run_json(*unstable, "--steps", "20")["warning"]
    assert run_json("simulate", "qg-dmsgd", *unstable[2:], "--steps", "20")["warning"] is None
    large = run("simulate", "dmsgd", "ring", "--lr", "0.1", "--steps", "100")
    assert large.exit_code == 0 and "The error grew" in large.output
