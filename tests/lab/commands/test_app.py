"""The command line as a user meets it: exit codes, names, errors in one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from decentlam import ALGORITHMS, TOPOLOGIES, __version__
from decentlam.__main__ import main
from decentlam.analysis.stability import CHOICES
from decentlam.lab import names
from decentlam.lab.commands.app import app
from decentlam.lab.data import DATASETS
from decentlam.lab.models import MODELS
from decentlam.lab.recipes import RECIPES
from decentlam.lab.studies import STUDIES
from decentlam.lab.terminal import Commands
from tests.lab.commands.running import run


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_says_what_to_do_next(arguments: tuple[str, ...]):
    result = run(*arguments)
    assert result.exit_code == 0
    assert "decentlam reproduce regression" in result.output
    for registered in app.registered_commands:
        assert registered.callback is not None and registered.callback.__name__ in result.output


ANSWER = """
import sys
from decentlam.__main__ import main

for words in ([], ["--version"], *([name, "--help"] for name in {commands!r})):
    sys.argv = ["decentlam", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
heavy = {{"torch", "numpy", "scipy", "sklearn", "matplotlib", "torchvision"}}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""


def test_help_imports_neither_torch_nor_matplotlib():
    """They take seconds. One process answers everything: it may have imported none at the end."""
    code = ANSWER.format(commands=[c.callback.__name__ for c in app.registered_commands])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_are_those_of_the_tables_they_come_from():
    tables = {"ALGORITHMS": ALGORITHMS, "TOPOLOGIES": TOPOLOGIES, "STABLE": CHOICES}
    tables |= {"MODELS": MODELS, "DATASETS": DATASETS, "STUDIES": STUDIES}
    assert {name: getattr(names, name) for name in tables} == {
        name: tuple(table) for name, table in tables.items()
    }


def test_version():
    assert run("--version").output == f"decentlam {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("topology", "rign"), "unknown topology 'rign'; did you mean 'ring'? choose from"),
        (("train", "--recipe", "digts"), "unknown recipe 'digts'; did you mean 'digits'?"),
        (("simulate", "nope", "ring"), "unknown algorithm 'nope'; choose from adamw"),
        (("reproduce", "nope"), ", ".join(STUDIES)),
        (("train", "--recipe", "nope"), ", ".join(RECIPES)),
        (("train", "--model", "nope"), ", ".join(MODELS)),
        (("topology", "ring", "-n", "0"), "at least 1 node"),
        (("topology", "ring", "--lazy", "2"), "rate must be in"),
        (("topology", "ring", "--steps", "0"), "steps must be 1 or more"),
        (("simulate", "decentlam", "exponential"), "needs symmetric weights"),
        (("simulate", "dmsgd", "ring", "--momentum", "2"), "momentum must be in"),
        (("reproduce", "bias", "--nodes", "3"), "4 nodes or more"),
        (("reproduce", "regression", "--seed", "-1"), "seed must be"),
        (("reproduce", "unlike", "--nodes", "16"), "leave --nodes out"),
        (("reproduce", "bias", "--data", "cifar10"), "bias reads no data"),
        (("reproduce", "models", "--quick", "--data", "cifar10"), "--quick makes do"),
        (("reproduce", "models", "--data", "cifar10"), "needs --data-path"),
        (("reproduce", "regression", "--out", "/dev/null/run"), "/dev/null"),
        (("topology", "ring", "--out", "/dev/null/ring.png"), "/dev/null"),
        (("train", "--batch", "127"), "cannot be divided among 4 nodes; try 128"),
        (("train", "--hyper", "mu"), "NAME=VALUE"),
        (("train", "--shards", "nope", "--simulate"), "unknown way to shard 'nope'"),
        (("train", "--data", "imagenet", "--simulate"), "needs --data-path"),
        (("train", "--resume", "--out", "nowhere"), "no run to resume in nowhere"),
        (("train", "--simulate", "--out", "/dev/null/run"), "/dev/null"),
        (("train", "--simulate", "--out", ""), "--out is empty"),
        (("reproduce", "regression", "--out", ""), "--out is empty"),
        (("report", "nowhere"), "nowhere"),
    ],
    ids=str,
)
def test_user_errors_are_one_line_and_exit_2(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and reason in result.output
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize("missing", ["typer", "matplotlib"])
def test_without_the_lab_extra_it_says_how_to_install(missing: str, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert f"needs {missing}," in said and said.count("\n") == 1
    assert 'pip install "decentlam[lab]", or in a checkout: pip install ".[lab]"' in said


def test_ctrl_c_exits_130_with_one_line():
    commands = typer.Typer(cls=Commands)

    @commands.command()
    def wait() -> None:
        signal.raise_signal(signal.SIGINT)

    commands.command("other")(wait)
    result = CliRunner().invoke(commands, ["wait"])
    assert (result.exit_code, result.output) == (130, "decentlam: interrupted\n")
