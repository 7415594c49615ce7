"""Data flows one way: which part of the library may import which, read from the source."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import decentlam

PACKAGE = Path(decentlam.__file__).parent
PARTS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
# The command line is the lab's, and the package's front page collects from everywhere.
CORE = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in ("lab", "__main__.py")
)
MAY_IMPORT = {
    "topology": set(),
    "algorithms": {"topology"},
    "errors": set(),
    "layout": set(),
    "gradients": set(),
    "exchange": {"algorithms", "topology", "errors", "layout"},
    "linear_map": {"algorithms", "topology", "exchange"},
    "stability": {"algorithms", "topology", "linear_map"},
    "simulate": {"algorithms", "topology", "exchange", "errors", "stability"},
    "module": {"algorithms", "topology", "exchange", "errors", "simulate"},
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; the rest of the code spells it out"
            if node.module == "decentlam":
                yield from (f"decentlam.{alias.name}" for alias in node.names)
            elif node.module is not None:
                yield node.module


def own_parts(path: Path) -> set[str]:
    """The parts of the library that a file imports, its own part left out."""
    names = [name.split(".") for name in imported(path)]
    parts = {name[1] for name in names if name[0] == "decentlam" and len(name) > 1}
    return parts - {part_of(path)}


def file_id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", CORE, ids=file_id)
def test_core_imports_torch_numpy_and_the_standard_library_only(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert roots <= {"torch", "numpy", "decentlam"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", CORE, ids=file_id)
def test_core_never_imports_the_lab(path: Path) -> None:
    assert "lab" not in own_parts(path)


@pytest.mark.parametrize("path", [path for path in CORE if path.name != "__init__.py"], ids=file_id)
def test_modules_import_parts_and_not_the_front_page(path: Path) -> None:
    assert "decentlam" not in imported(path)
    assert own_parts(path) <= PARTS


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_what_lies_below_it(part: str) -> None:
    files = [path for path in CORE if part_of(path) == part]
    assert files
    for path in files:
        assert own_parts(path) <= MAY_IMPORT[part], path


def test_parts_do_not_import_each_other_in_a_circle() -> None:
    below: dict[str, set[str]] = {}
    for path in CORE:
        if part_of(path) != "__init__":
            below.setdefault(part_of(path), set()).update(own_parts(path))
    TopologicalSorter(below).prepare()  # raises CycleError, naming the circle


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_prints_nothing_and_leaves_the_lab_and_the_log_alone() -> None:
    code = """
import logging, sys
import decentlam
for name in ("typer", "rich", "matplotlib", "decentlam.lab"):
    assert name not in sys.modules, name
assert not logging.getLogger().handlers and not logging.getLogger("decentlam").handlers
"""
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
