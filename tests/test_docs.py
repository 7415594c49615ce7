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
WITH_EXAMPLES = {
    f"decentlam.{name}"
    for name in (
        "simulation.simulate", "optim", "optimizer", "topology.base", "topology.custom",
        "algorithms",
    )
}  # fmt: skip


def test_modules_that_must_have_examples_are_there() -> None:
    assert set(MODULES) >= WITH_EXAMPLES


@pytest.mark.parametrize("name", ["decentlam", *MODULES])
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a file opens with one sentence on what the reader will find"
    found = doctest.testmod(module)
    assert found.failed == 0
    assert found.attempted > 0 or name not in WITH_EXAMPLES
