"""The command line as a user meets it: exit codes, one JSON document, files, errors in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decentlam import ALGORITHMS, TOPOLOGIES, __version__
from decentlam.__main__ import main
from decentlam.lab.cli import app
from decentlam.lab.studies import STUDIES

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
    for command in ("algorithms", "topologies", "topology", "reproduce", "simulate"):
        assert command in result.output


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


def test_topology_lazy_large_and_changing():
    lazy = run_json("topology", "ring", "-n", "8", "--lazy", "0.5")
    assert lazy["rho"] == pytest.approx(0.9023689) and lazy["positive_definite"]
    large = run("topology", "ring", "-n", "100").output
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
        (("nope",), ("algorithms", "reproduce")),
    ],
    ids=str,
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
        (("topology", "ring", "--lazy", "2"), "pace must be in"),
        (("topology", "ring", "--steps", "0"), "steps must be 1 or more"),
        (("simulate", "decentlam", "exponential"), "needs symmetric weights"),
        (("simulate", "dmsgd", "ring", "--momentum", "2"), "momentum must be in"),
        (("reproduce", "speedup", "--nodes", "1"), "try 32"),
        (("reproduce", "bias", "--nodes", "3"), "4 nodes or more"),
        (("reproduce", "regression", "--seed", "-1"), "seed must be"),
        (("reproduce", "regression", "--out", "/dev/null/run"), "/dev/null"),
        (("topology", "ring", "--out", "/dev/null/ring.png"), "/dev/null"),
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
    assert not (tmp_path / "out" / "regression").exists()


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


def test_without_the_lab_extra_it_says_how_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "decentlam.lab.cli")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert 'pip install "decentlam[lab]"' in capsys.readouterr().err


def test_ctrl_c_exits_130_with_one_line(tmp_path: Path):
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "decentlam", "reproduce", "bias", "--out", str(directory)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        deadline = time.monotonic() + 90
        while not directory.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert errors == "decentlam: interrupted\n"
