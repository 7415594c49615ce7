"""A release says the same of itself everywhere."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import decentlam
from decentlam.__main__ import _LAB as LAB

ROOT = Path(__file__).parent.parent


def test_the_version_is_the_same_everywhere() -> None:
    assert version("decentlam") == decentlam.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {decentlam.__version__}\n" in citation


def test_the_release_has_a_dated_entry_in_the_changelog() -> None:
    released = re.search(
        r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert released
    entry = f"## [{decentlam.__version__}] - {released[1]}\n"
    assert entry in (ROOT / "CHANGELOG.md").read_text()


def test_the_source_release_has_the_requirements_that_the_makefile_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    read = set(re.findall(r"requirements[a-z-]*\.(?:in|txt)", (ROOT / "Makefile").read_text()))
    assert len(read) == 4 and {f"/{name}" for name in read} <= set(included)


def test_the_tests_that_every_python_is_tried_with_are_there() -> None:
    listed = re.search(r"TESTS = \((.*?)\n\)", (ROOT / "scripts/try_versions.py").read_text(), re.S)
    assert listed
    names = re.findall(r'"([^"]+)"', listed[1])
    assert names and all((ROOT / "tests" / name).exists() for name in names)


def test_the_command_line_looks_for_what_its_extra_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = [each.partition(">=")[0] for each in project["optional-dependencies"]["lab"]]
    modules = {"scikit-learn": "sklearn"}
    assert sorted(modules.get(name, name) for name in brought) == sorted(LAB)
