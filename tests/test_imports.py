"""Data flows one way: which part of the library may import which, read from the source."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import decentlam

PACKAGE = Path(decentlam.__file__).parent
# Integrations need their framework, the command line is the lab's, and the package's front page
# collects from everywhere.
CORE = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in ("lab", "integrations", "__main__.py")
)
MAY_IMPORT = {
    "errors": set(),
    "topology": {"errors"},
    "data": set(),
    "algorithms": {"topology", "errors"},
    "network": {"errors"},
    "exchange": {"algorithms", "topology", "network"},
    "options": {"algorithms", "exchange", "topology"},
    "analysis": {"algorithms", "topology", "exchange", "options"},
    "simulation": {"algorithms", "topology", "exchange", "errors", "analysis"},
    "runtime": {"algorithms", "topology", "network", "exchange", "errors", "options", "analysis"},
    "elastic": {"algorithms", "topology", "network", "exchange", "errors", "data", "runtime"},
    "launch": {"errors", "network", "elastic"},
    "optimizer": {
        "algorithms", "topology", "network", "data", "options", "runtime", "elastic", "launch",
    },
    "optim": {"algorithms", "options", "optimizer"},
    "local_steps": {
        "algorithms", "topology", "errors", "network", "exchange", "data", "options", "runtime",
        "optimizer",
    },
    "checkpoint": {"errors", "network", "runtime", "optimizer", "local_steps"},
    "monitoring": {
        "algorithms", "topology", "network", "exchange", "elastic", "optimizer", "local_steps",
    },
}  # fmt: skip
AT_THE_TOP = 8  # files, at most


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


def test_the_front_page_collects_from_the_core_only() -> None:
    assert own_parts(PACKAGE / "__init__.py") <= MAY_IMPORT.keys()


@pytest.mark.parametrize("path", [path for path in CORE if path.name != "__init__.py"], ids=file_id)
def test_modules_do_not_import_the_front_page(path: Path) -> None:
    assert "decentlam" not in imported(path)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_what_lies_below_it(part: str) -> None:
    files = [path for path in CORE if part_of(path) == part]
    assert files
    for path in files:
        assert own_parts(path) <= MAY_IMPORT[part], path


def test_the_rules_allow_no_circle_and_neither_lab_nor_integrations() -> None:
    assert set().union(*MAY_IMPORT.values()) <= MAY_IMPORT.keys()
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError, naming the circle


def test_every_part_has_its_rule_and_few_files_are_loose() -> None:
    parts = {part_of(path) for path in CORE}
    assert parts - {"__init__"} == set(MAY_IMPORT)
    assert len([path for path in PACKAGE.glob("*.py")]) <= AT_THE_TOP


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("extra", "package"),
    [("lightning", "lightning"), ("huggingface", "transformers"), ("ray", "ray")],
)
def test_an_integration_without_its_framework_names_the_extra(
    extra: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"decentlam.integrations.{extra}", raising=False)
    with pytest.raises(ImportError, match=re.escape(f"pip install decentlam[{extra}]")) as raised:
        importlib.import_module(f"decentlam.integrations.{extra}")
    assert package in str(raised.value)


def test_importing_prints_nothing_and_leaves_the_log_alone_and_is_lazy_in_the_lab() -> None:
    code = """
import logging, sys
import decentlam
for name in ("torch", "typer", "rich", "matplotlib", "decentlam.lab"):
    assert name not in sys.modules, name
import decentlam.launch.init
import decentlam.runtime.bucket
assert decentlam.launch.__name__ == "launch" and callable(decentlam.launch)
from decentlam import DecentLaM, launch, topology
assert topology.ring(4).num_nodes == 4 and decentlam.DecentLaM is DecentLaM
assert decentlam.runtime.bucket and decentlam.errors.ExchangeError
assert not hasattr(decentlam, "DecentLaN") and {"DecentLaM", "topology"} <= set(dir(decentlam))
assert not logging.getLogger().handlers and not logging.getLogger("decentlam").handlers
import decentlam.lab.data, decentlam.lab.models, decentlam.lab.schedules
assert not {"torchvision", "sklearn", "PIL", "matplotlib"} & set(sys.modules)
"""
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_front_page_says_the_same_to_python_and_to_type_checkers() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    listed = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = {name for name, module in listed.items() if module == "decentlam"}
    assert {name: home for name, home in listed.items() if name not in parts} == decentlam._HOME
    assert {*decentlam.__all__} == {*listed, "launch"}
    for name in decentlam.__all__:
        assert getattr(decentlam, name) is not None
