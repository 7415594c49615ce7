"""The documentation keeps its word: blocks run, commands parse, quoted messages exist."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import doctest
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from decentlam import ALGORITHMS, TOPOLOGIES
from tests.helpers.processes import HANG_SECONDS, run_processes
from tests.helpers.scripts import run_script

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT) for path in ROOT.glob("docs/**/*.md"))
FENCE = re.compile(
    r"^```(\w+)(?: title=\"([^\"\n]+)\")?(?: hl_lines=\"[\d ]+\")?\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    file: str | None  # a whole script, under this name
    text: str


def blocks() -> list[Block]:
    found = []
    for page in [Path("README.md"), Path("CONTRIBUTING.md"), *PAGES]:
        text = (ROOT / page).read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(page), line, *match.groups()))
    return found


# Python -----------------------------------------------------------------------------------------


def what_a_reader_has() -> dict[str, Any]:
    """The names that pages use without defining them: a model, data, what training needs."""
    import decentlam

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    algorithm = decentlam.algorithms.DecentLaM()
    x = torch.zeros(4, 3)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "loader": [(torch.randn(3, 4), torch.tensor([0, 1, 1])) for _ in range(4)],
        "loss_fn": nn.CrossEntropyLoss(),
        "evaluate": nn.Module.eval,
        "total_steps": 2,
        "steps": 2,
        "inputs": torch.randn(64, 4),
        "labels": torch.randint(2, (64,)),
        "loss_of": lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        # of a simulation
        "algorithm": algorithm,
        "x": x,
        "g": torch.ones(4, 3),
        "state": algorithm.init(x),
        "step": decentlam.algorithms.Step(0, 0.1),
        "weights": decentlam.topology.ring(4).weights().float(),
    }


def run_pages(pages: dict[str, list[Block]], directory: str) -> None:
    """All blocks of each page, one after the other, as its reader would."""
    os.chdir(directory)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any that is free
    for page, found in pages.items():
        if dist.is_initialized():
            dist.destroy_process_group()
        names = what_a_reader_has()
        for block in found:
            place = f"{page}, line {block.line}"
            if block.language == "python":
                exec(compile(block.text, place, "exec"), names)
                continue
            test = doctest.DocTestParser().get_doctest(block.text, names, place, page, 0)
            test.globs = names
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            assert runner.run(test, clear_globs=False).failed == 0, place


def test_python_blocks_run(tmp_path: Path) -> None:
    pages: dict[str, list[Block]] = {}
    for block in blocks():
        if block.language in ("python", "pycon") and block.file is None:
            pages.setdefault(block.page, []).append(block)
    assert len(pages) > 20
    assert run_processes(run_pages, 1, (pages, str(tmp_path))) == [None]


def script(name: str, directory: Path) -> Path:
    (found,) = (block for block in blocks() if block.file == name)
    path = directory / name
    path.write_text(found.text)
    return path


@pytest.mark.system
@pytest.mark.parametrize("name", ["train_ddp.py", "train.py", "sharded.py"])
def test_the_scripts_of_the_guides_train(name: str, tmp_path: Path) -> None:
    text = run_script(script(name, tmp_path), tmp_path, 4)
    shown = re.search(r"^accuracy ([\d.]+)", text, re.MULTILINE)
    assert shown, text
    assert float(shown[1]) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rates.py", "emulate.py", "elastic.py"])
def test_scripts_that_start_processes_run(name: str, tmp_path: Path) -> None:
    if name == "emulate.py" and os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    subprocess.run([sys.executable, script(name, tmp_path)], check=True, timeout=HANG_SECONDS)


# Commands ---------------------------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for block in blocks():
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.append((f"{block.page}: {line}", words))
    return found


class Parsed(Exception):  # noqa: N818
    """The command line was understood; what it asks for is not done."""


def understood(*args: Any, **kwargs: Any) -> None:
    raise Parsed


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises `Parsed` if the program takes these arguments."""
    from typer.core import TyperCommand

    from decentlam.__main__ import main

    program, *arguments = words
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(arguments)
        if options.training_script == "decentlam":
            parse(["decentlam", *options.training_script_args], monkeypatch)
        raise Parsed
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    if program == "decentlam":
        monkeypatch.setattr(TyperCommand, "invoke", understood)
        main()
    whole = argparse.ArgumentParser.parse_known_args

    def parse_then_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        _, unknown = whole(self, *args, **kwargs)
        assert not unknown, unknown
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_then_stop)
    if arguments[0] == "-m":
        monkeypatch.setattr(sys, "argv", arguments[1:])
        package = hasattr(importlib.import_module(arguments[1]), "__path__")
        module = f"{arguments[1]}.__main__" if package else arguments[1]
        monkeypatch.delitem(sys.modules, module, raising=False)
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    script = ROOT / arguments[0]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.syspath_prepend(str(script.parent))  # as Python does for a script
    runpy.run_path(str(script), run_name="__main__")


# What comes with other software, or installs something.
OTHERS = ("pip", "uv", "mpirun", "srun", "sbatch", "sysctl", "apt-get")


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    checked = 0
    for place, words in commands():
        if words[0] == "make":
            assert set(words[1:]) <= targets, place
        elif words[0] not in OTHERS and words != ["python", "train.py"]:
            with monkeypatch.context() as patched:
                try:
                    parse(words, patched)
                except Parsed:
                    checked += 1
                except SystemExit as refused:
                    raise AssertionError(place) from refused
    assert checked > 20


# Messages ---------------------------------------------------------------------------------------


@cache
def strings_of_the_source() -> str:
    """All strings of the library, one per line; what an f-string fills in is an ellipsis."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "..." for v in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[dsg]", "...", node.value))
    return "\n".join(text.replace("\n", " ") for text in found)


def test_messages_on_the_page_of_troubles_are_in_the_source() -> None:
    page = (ROOT / "docs/trouble.md").read_text()
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(messages) > 30
    patterns = {m: ".*".join(map(re.escape, m.split("..."))) for m in messages}
    text = strings_of_the_source()
    assert [m for m, pattern in patterns.items() if not re.search(pattern, text)] == []


# The site ---------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_and_every_method_has_one() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to("docs")) for page in PAGES}
    assert {page.stem for page in PAGES if page.parent.name == "methods"} == {"index", *ALGORITHMS}


# Topologies -------------------------------------------------------------------------------------


def test_the_documentation_lists_every_topology() -> None:
    """By hand in one table; the other is computed when the site is built."""
    page = (ROOT / "docs/topologies.md").read_text()
    by_hand = page.split("## All of them\n")[1].split("\n\n|")[1].split("\n\n")[0]
    computed = runpy.run_path(str(ROOT / "scripts" / "site.py"))["numbers"]()
    for table in (by_hand, computed):
        names = [row.split("|")[1].strip(" `") for row in table.split("\n")[2:]]
        assert sorted(names) == sorted(TOPOLOGIES)
