"""The command line as a user meets it: exit codes, one JSON document, files, errors in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import runs
import typer
from launching import fork
from typer.testing import CliRunner

from decentlam import ALGORITHMS, TOPOLOGIES, __version__
from decentlam.__main__ import main
from decentlam.analysis.cost.values import ALL_REDUCES, OVERLAPS
from decentlam.analysis.stability import CHOICES
from decentlam.lab import names
from decentlam.lab.cli import app
from decentlam.lab.data import DATASETS
from decentlam.lab.models import MODELS
from decentlam.lab.recipes import BATCH_NORMS, PRECISIONS, RECIPES, Recipe, command, make
from decentlam.lab.schedules import SCHEDULES
from decentlam.lab.studies import STUDIES
from decentlam.lab.train_command import changes_of

PNG = b"\x89PNG\r\n"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), prog_name="decentlam")


def run_json(*arguments: str):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_says_what_to_do_next(arguments: tuple[str, ...]):
    result = run(*arguments)
    assert result.exit_code == 0
    assert "decentlam reproduce regression" in result.output
    for registered in app.registered_commands:
        assert registered.callback is not None and registered.callback.__name__ in result.output


QUICK_TO_ANSWER = (
    ("--help",),
    ("--version",),
    ("nope",),
    *((name, "--help") for name in ("train", "topology", "reproduce", "predict", "simulate")),
    ("train", "--nope"),
    ("train", "--recipe", "nope"),
    ("train", "--method", "nope"),
    ("simulate", "dsgd", "nope"),
    ("reproduce", "nope"),
)

ANSWER = """
import sys
from decentlam.__main__ import main
from decentlam.launch.__main__ import main as launch

for words in {commands!r}:
    sys.argv = ["decentlam", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == (2 if "nope" in " ".join(words) else 0), words
try:
    launch(["--help"])
except SystemExit:
    pass
heavy = {{"torch", "numpy", "scipy", "sklearn", "matplotlib", "torchvision", "tensorboard"}}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""


def test_help_and_typos_import_neither_torch_nor_matplotlib():
    """They take seconds. One process answers everything: it may have imported none at the end."""
    code = ANSWER.format(commands=QUICK_TO_ANSWER)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("known", "table"),
    [
        (names.ALGORITHMS, ALGORITHMS),
        (names.TOPOLOGIES, TOPOLOGIES),
        (names.STABLE, CHOICES),
        (names.OVERLAPS, OVERLAPS[:3]),
        (names.ALL_REDUCES, ALL_REDUCES),
        (names.RECIPES, RECIPES),
        (names.MODELS, MODELS),
        (names.DATASETS, DATASETS),
        (names.SCHEDULES, SCHEDULES),
        (names.PRECISIONS, PRECISIONS),
        (names.BATCH_NORMS, BATCH_NORMS),
        (names.STUDIES, STUDIES),
    ],
    ids=lambda value: " ".join(value)[:20],
)
def test_names_are_those_of_the_tables_they_come_from(known, table):
    assert known == tuple(table)


def test_version():
    assert run("--version").output == f"decentlam {__version__}\n"


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


def test_topology_shows_weights_spectrum_and_bytes(tmp_path: Path):
    picture = tmp_path / "new" / "mesh.png"
    facts = run_json(
        "topology", "mesh", "-n", "8", "--message-bytes", "1000", "--out", str(picture)
    )
    assert facts["rho"] == pytest.approx(0.8535534)
    assert facts["symmetric"] and facts["doubly_stochastic"] and not facts["positive_definite"]
    step = facts["steps"][0]
    assert step["bytes_per_node"] == {"fewest": 2000, "most": 3000}
    assert step["eigenvalues"][0] == pytest.approx(1)
    assert sum(step["weights"][0]) == pytest.approx(1)
    assert picture.read_bytes().startswith(PNG)
    text = run("topology", "mesh", "-n", "8").output
    assert "0.853553" in text and "0.417" in text


@pytest.mark.system
def test_topology_lazy_large_and_changing():
    lazy = run_json("topology", "ring", "-n", "8", "--lazy", "0.5")
    assert lazy["rho"] == pytest.approx(0.9023689) and lazy["positive_definite"]
    large = run("topology", "ring", "-n", "130").output
    assert "from 0.3333 to 0.3333" in large and "..." in large
    changing = run_json("topology", "bipartite-random-match", "-n", "4", "--steps", "3")
    assert len(changing["steps"]) == 3 and changing["period"] is None


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("topology", "nope"), TOPOLOGIES),
        (("simulate", "nope", "ring"), ALGORITHMS),
        (("simulate", "dsgd", "nope"), TOPOLOGIES),
        (("reproduce", "nope"), STUDIES),
        (("nope",), ("algorithms", "reproduce", "train", "recipes", "report")),
        (("train", "--recipe", "nope"), RECIPES),
        (("train", "--method", "nope"), ALGORITHMS),
        (("train", "--topology", "nope"), TOPOLOGIES),
        (("train", "--model", "nope"), MODELS),
        (("train", "--data", "nope"), DATASETS),
        (("train", "--schedule", "nope"), SCHEDULES),
    ],
    ids=lambda value: " ".join(value),  # names only: addresses differ between test processes
)
def test_unknown_names_exit_2_and_list_the_valid_ones(arguments: tuple[str, ...], names):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "nope" in result.output and result.output.count("\n") == 1
    assert all(name in result.output for name in names)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("topology", "ring", "-n", "0"), "at least 1 node"),
        (("topology", "ring", "--lazy", "2"), "rate must be in"),
        (("topology", "ring", "--steps", "0"), "steps must be 1 or more"),
        (("simulate", "decentlam", "exponential"), "needs symmetric weights"),
        (("simulate", "dmsgd", "ring", "--momentum", "2"), "momentum must be in"),
        (("reproduce", "speedup", "--nodes", "1"), "try 32"),
        (("reproduce", "bias", "--nodes", "3"), "4 nodes or more"),
        (("reproduce", "regression", "--seed", "-1"), "seed must be"),
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
    assert reason in result.output and result.output.count("\n") == 1
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.system
def test_reproduce_writes_a_run_directory_and_prints_only_json(tmp_path: Path):
    found = run_json("reproduce", "regression", "--quick", "--out", str(tmp_path / "run"))
    assert {row["method"] for row in found["table"]} == ALGORITHMS.keys()
    for name in found["files"]:
        assert Path(name).stat().st_size > 0
    pictures = [Path(name) for name in found["files"] if name.endswith(".png")]
    assert len(pictures) == 2
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)


def test_simulate_prints_the_closed_form_beside_the_result(tmp_path: Path):
    picture = tmp_path / "curve.svg"
    found = run_json("simulate", "decentlam", "ring", "-n", "4", "--out", str(picture))
    assert found["final_error"] == pytest.approx(found["closed_form"], rel=1e-6)
    assert picture.read_text().startswith("<?xml")
    noisy = run_json("simulate", "dsgd", "ring", "--steps", "20", "--sigma", "1")
    assert noisy["final_error"] > 0


def test_simulate_warns_of_divergence():
    unstable = ("simulate", "decentlam", "bipartite-random-match", "--momentum", "0.9")
    assert "multiplies the disagreement by 1." in run_json(*unstable, "--steps", "20")["warning"]
    assert run_json("simulate", "qg-dmsgd", *unstable[2:], "--steps", "20")["warning"] is None
    large = run("simulate", "dmsgd", "ring", "--lr", "0.1", "--steps", "100")
    assert large.exit_code == 0 and "The error grew" in large.output


QUICK = ("--simulate", "-n", "2", "--epochs", "0.2", "--log-every", "1")  # 2 steps of digits


def records(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]


def test_recipes_lists_every_name():
    assert run_json("recipes").keys() == RECIPES.keys()
    text = run("recipes").output
    assert all(name in text for name in RECIPES)


def test_train_has_an_option_for_every_field_of_a_recipe():
    text = run("train", "--help").output
    for field in dataclasses.fields(Recipe):
        assert f"--{field.name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    "recipe",
    [
        make("digits", nesterov=True, hyper={"mu": 0.5}, method="qg-dmsgd"),
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
    assert make(options["recipe"], **changes_of(options)) == recipe


def test_train_prints_one_document_and_names_the_directory_after_the_changes(
    tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    summary = run_json("train", *QUICK, "--method", "dmsgd", "--quiet")
    assert (summary["status"], summary["step"], summary["steps"]) == ("finished", 2, 2)
    assert summary["directory"] == "out/train/digits-dmsgd-nodes2-epochs0.2-log-every1"
    assert 0 <= summary["evaluation"]["averaged_top1"] <= 1 and summary["resume"] is None
    again = run_json("train", *QUICK, "--method", "dmsgd", "--quiet")
    assert again["directory"] == summary["directory"] + "-2"
    assert again["evaluation"] == summary["evaluation"]


def test_train_shows_lines_where_there_is_no_terminal_and_nothing_if_quiet(tmp_path: Path):
    shown = run("train", *QUICK, "--out", str(tmp_path / "shown"))
    assert shown.exit_code == 0
    assert "step 2/2  epoch 0.1818  loss 2." in shown.stderr and "top-1 " in shown.stderr
    assert "finished" in shown.stdout and f"Wrote {tmp_path / 'shown'}" in shown.stdout
    quiet = run("train", *QUICK, "--out", str(tmp_path / "quiet"), "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_resume_needs_the_directory_alone(tmp_path: Path):
    directory = str(tmp_path / "run")
    run_json("train", *QUICK, "--out", directory, "--quiet")
    assert run_json("train", "--resume", "--out", directory, "--quiet")["step"] == 2
    other = run("train", "--resume", "--out", directory, "--lr", "0.3")
    assert other.exit_code == 2 and "lr was 0.05, is 0.3" in other.output
    taken = run("train", *QUICK, "--out", directory)
    assert taken.exit_code == 2 and "holds a run already" in taken.output


def test_divergence_exits_1_with_one_line(tmp_path: Path):
    wild = ("--lr", "1e18", "--out", str(tmp_path), "--quiet")
    result = run("train", *QUICK, *wild)
    assert result.exit_code == 1
    assert result.output.startswith("decentlam: diverged: ") and result.output.count("\n") == 1
    assert records(tmp_path)[-1]["status"] == "diverged"


def test_report_writes_a_page_beside_the_run(tmp_path: Path):
    run_json("train", *QUICK, "--out", str(tmp_path / "run"), "--quiet")
    page = Path(run_json("report", str(tmp_path / "run"))["report"])
    assert page == tmp_path / "run" / "report.html" and "decentlam" in page.read_text()
    assert f"Wrote {page}" in run("report", str(tmp_path / "run"), "--out", str(page)).output


def test_without_the_lab_extra_it_says_how_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "decentlam.lab.cli")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert 'pip install "decentlam[lab]"' in capsys.readouterr().err


@pytest.mark.system
def test_ctrl_c_exits_130_with_one_line(tmp_path: Path):
    """While it reads a file that never ends: in the midst of numpy, an interrupt may get lost."""
    endless = tmp_path / "calibration.json"
    os.mkfifo(endless)
    options = ["--parameters", "1000", "--compute-ms", "10", "--calibration", str(endless)]
    process = fork(_main, tmp_path / "output", "predict", *options)
    try:
        writer = _open_once_read(endless, process)
        os.kill(process.pid, signal.SIGINT)
        process.join(runs.HANG_SECONDS)
        os.close(writer)
    finally:
        process.kill()
    errors = (tmp_path / "output").read_text()
    assert process.exitcode == 130, errors
    assert errors == "decentlam: interrupted\n"


def _main(*words: str) -> None:
    sys.argv = ["decentlam", *words]
    main()


def _open_once_read(fifo: Path, reader: BaseProcess) -> int:
    deadline = time.monotonic() + runs.HANG_SECONDS
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)  # refused while nobody reads
        except OSError:
            assert reader.is_alive() and time.monotonic() < deadline
            time.sleep(0.05)
