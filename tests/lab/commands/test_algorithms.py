"""The list of methods."""

from __future__ import annotations

from decentlam import ALGORITHMS
from tests.lab.commands.running import run, run_json


def test_algorithms_lists_every_name_and_recursion():
    rows = {row["name"]: row for row in run_json("algorithms")}
    assert rows.keys() == ALGORITHMS.keys()
    assert rows["dsgd"]["recursion"] == "x+ = W (x - lr g)"
    assert rows["pmsgd-lars"]["hyper_parameters"]["lars"] is True
    text = run("algorithms").output
    assert all(name in text for name in ALGORITHMS)
