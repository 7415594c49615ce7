"""The lists of methods, topologies and recipes."""

from __future__ import annotations

from decentlam import ALGORITHMS, TOPOLOGIES
from decentlam.lab.recipes import RECIPES
from tests.lab.commands.running import run, run_json


def test_algorithms_lists_every_name_and_recursion():
    rows = {row["name"]: row for row in run_json("algorithms")}
    assert rows.keys() == ALGORITHMS.keys()
    assert rows["dsgd"]["recursion"] == "x+ = W (x - lr g)"
    assert rows["pmsgd-lars"]["hyper_parameters"]["lars"] is True
    text = run("algorithms").output
    assert all(name in text for name in ALGORITHMS)


def test_topologies_lists_every_name_also_where_n_does_not_fit():
    rows = {row["name"]: row for row in run_json("topologies", "-n", "6")}
    assert rows.keys() == TOPOLOGIES.keys()
    assert rows["ring"]["messages"] == 2
    assert rows["hypercube"]["rho"] is None and "power of two" in rows["hypercube"]["note"]
    assert run("topologies").exit_code == 0


def test_recipes_lists_every_name():
    assert run_json("recipes").keys() == RECIPES.keys()
    text = run("recipes").output
    assert all(name in text for name in RECIPES)
