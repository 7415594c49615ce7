"""The examples in the docstrings of the core run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import decentlam

MODULES = [
    found.name
    for found in pkgutil.walk_packages(decentlam.__path__, "decentlam.")
    if not found.name.startswith(("decentlam.lab", "decentlam.integrations.", "decentlam.__main__"))
]


@pytest.mark.parametrize("name", ["decentlam", *MODULES])
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a file opens with one sentence on what the reader will find"
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "name",
    ["simulation.simulate", "optim", "optimizer", "topology.base", "topology.custom", "algorithms"],
)
def test_there_are_examples_to_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"decentlam.{name}")).attempted > 0
