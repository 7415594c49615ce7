"""The list of topologies."""

from __future__ import annotations

from decentlam import TOPOLOGIES
from tests.lab.commands.running import run, run_json


def test_topologies_lists_every_name_also_where_n_does_not_fit():
    rows = {row["name"]: row for row in run_json("topologies", "-n", "6")}
    assert rows.keys() == TOPOLOGIES.keys()
    assert rows["ring"]["messages"] == 2
    assert rows["hypercube"]["rho"] is None and "power of two" in rows["hypercube"]["note"]
    assert run("topologies").exit_code == 0
