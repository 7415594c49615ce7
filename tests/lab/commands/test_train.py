"""`decentlam train`: its options, what it writes, and how it ends."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from decentlam.lab.commands.app import app
from decentlam.lab.commands.train import _pair
from decentlam.lab.recipes import Recipe, command, make
from tests.lab.commands.running import QUICK, run, run_json
from tests.lab.helpers import records


@pytest.mark.parametrize(
    "recipe",
    [
        make("digits", hyper={"mu": 0.5, "nesterov": True}, method="qg-dmsgd"),
        make("fashion-mlp", nodes=5, seed=7, micro_batch=200),
        make("imagenet-resnet50-16k", batch=4096, lr=6.4, data_path="a folder"),
        make(None, method="slowmo", hyper={"tau": 3, "base": "local"}, warmup_epochs=1.5),
        make("cifar10-resnet20", topology="hypercube", precision="bfloat16"),
    ],
    ids=lambda recipe: recipe.method + " " + recipe.data,
)
def test_the_command_of_a_recipe_gives_that_recipe(recipe: Recipe):
    words = shlex.split(command(recipe, "--simulate"))
    assert words[:2] == ["decentlam", "train"]
    commands = typer.main.get_command(app)
    options = commands.get_command(None, "train").make_context("train", words[2:]).params
    given = {f.name: options[f.name] for f in dataclasses.fields(Recipe)}
    changes = {name: value for name, value in given.items() if value is not None}
    if "hyper" in changes:
        changes["hyper"] = [_pair(text) for text in changes["hyper"]]
    assert make("digits", **changes) == recipe


def test_train_prints_one_document_and_finds_a_free_directory(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = run_json("train", *QUICK, "--method", "dmsgd", "--quiet")
    assert (summary["status"], summary["step"], summary["steps"]) == ("finished", 2, 2)
    assert summary["directory"] == "out/train/digits"
    assert 0 <= summary["evaluation"]["averaged_top1"] <= 1 and summary["resume"] is None
    again = run_json("train", *QUICK, "--method", "dmsgd", "--quiet")
    assert again["directory"] == summary["directory"] + "-2"
    assert again["evaluation"] == summary["evaluation"]


def test_train_shows_lines_where_there_is_no_terminal_and_nothing_if_quiet(tmp_path: Path):
    shown = run("train", *QUICK, "--watch", "--out", str(tmp_path / "shown"))
    assert shown.exit_code == 0 and "shown at http://127.0.0.1:" in shown.stderr
    assert "step 0 of 2  decentlam on digits" in shown.stderr
    assert "step 2 of 2  epoch 0.1818  loss 2." in shown.stderr and "top-1 " in shown.stderr
    assert "finished" in shown.stdout and f"Wrote {tmp_path / 'shown'}" in shown.stdout
    quiet = run("train", *QUICK, "--out", str(tmp_path / "quiet"), "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_train_writes_its_report_and_a_report_that_fails_fails_no_run(tmp_path: Path, monkeypatch):
    written = run_json("train", *QUICK, "--out", str(tmp_path / "one"), "--quiet")["report"]
    assert written == str(tmp_path / "one" / "report.html")
    assert "decentlam" in Path(written).read_text()

    def fail(*arguments: object) -> None:
        raise RuntimeError("no page today")

    monkeypatch.setattr("decentlam.lab.report.write", fail)
    found = run_json("train", *QUICK, "--out", str(tmp_path / "two"), "--quiet")
    assert (found["status"], found["report"]) == ("finished", None)


def test_resume_needs_the_directory_alone_and_a_checkpoint(tmp_path: Path):
    directory = tmp_path / "run"
    run_json("train", *QUICK, "--out", str(directory), "--quiet")
    resume = ("train", "--resume", "--out", str(directory), "--quiet")
    assert run_json(*resume)["step"] == 2
    assert "lr was 0.05, is 0.3" in run(*resume, "--lr", "0.3").output
    shutil.rmtree(directory / "checkpoint")
    before = (directory / "records.jsonl").read_bytes()
    again = run(*resume)
    assert again.exit_code == 2 and again.output.count("\n") == 1
    assert "left no checkpoint to resume from" in again.output
    anew = run("train", *QUICK, "--out", str(directory), "--quiet")
    assert anew.exit_code == 2 and "--resume" not in anew.output
    assert (directory / "records.jsonl").read_bytes() == before


def test_divergence_exits_1_with_one_line(tmp_path: Path):
    wild = ("--lr", "1e18", "--out", str(tmp_path), "--quiet")
    result = run("train", *QUICK, *wild)
    assert result.exit_code == 1
    assert result.output.startswith("decentlam: diverged: ") and result.output.count("\n") == 1
    assert records(tmp_path)[-1]["status"] == "diverged"


PLAN = ["train", "--epochs", "2", "-n", "2", "--quiet"]


def ends(arguments: list[str], capfd: Any) -> tuple[int, str]:
    """The exit code and what was written to stderr, by threads and C++ as well."""
    with pytest.raises(SystemExit) as end:
        app(arguments, prog_name="decentlam")
    return int(end.value.code or 0), capfd.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few pages."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named(small_disk: Path, capfd: Any) -> None:
    code, text = ends([*PLAN, "--simulate", "--out", str(small_disk / "run")], capfd)
    assert code in (1, 2) and "No space left on device" in text
    assert "Traceback" not in text, text
