"""The list of recipes."""

from __future__ import annotations

from decentlam.lab.recipes import RECIPES
from tests.lab.commands.running import run, run_json


def test_recipes_lists_every_name():
    assert run_json("recipes").keys() == RECIPES.keys()
    text = run("recipes").output
    assert all(name in text for name in RECIPES)
