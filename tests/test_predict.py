"""`decentlam predict`: tables, plots, calibrations, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from measured import TRUTH, benchmark
from typer.testing import CliRunner

from decentlam.analysis.cost import Calibration
from decentlam.lab.bandwidth import parse_bandwidth
from decentlam.lab.calibration import save_calibration
from decentlam.lab.cli import app
from decentlam.lab.models import MODELS


def run(*arguments: str):
    return CliRunner().invoke(app, ["predict", *arguments], prog_name="decentlam")


def run_json(*arguments: str):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100Mbit", 1e8), ("1Gbit", 1e9), ("25Gbit/s", 25e9), ("10Gbps", 1e10), ("1e9", 1e9)],
)
def test_bandwidths(text: str, bits: float):
    assert parse_bandwidth(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "-1Gbit", "0", "25GB", "1.2.3Mbit", "nan", "1e999"])
def test_bad_bandwidths_list_what_is_allowed(text: str):
    with pytest.raises(ValueError, match="such as 100Mbit, 1Gbit, 25Gbit/s"):
        parse_bandwidth(text)


@pytest.mark.system
def test_predict_prints_every_method_and_topology_and_draws(tmp_path: Path):
    picture = tmp_path / "nodes.png"
    options = ("-n", "8", "--bandwidth", "10Gbit", "--compute-ms", "100", "--batch", "256")
    found = run_json(*options, "--plot", str(picture))
    assert found["model_bytes"] == 25_557_032 * 4
    rows = {(row["method"], row["topology"]): row for row in found["rows"]}
    one = rows["decentlam", "one-peer-hypercube"]
    assert one["speed_up"] > 1 > rows["da-dmsgd", "hypercube"]["speed_up"]
    assert one["sent_MB"] == pytest.approx(102.228128) and one["spectral_gap"] == 1
    assert not one["stable"] and rows["dmsgd", "one-peer-hypercube"]["stable"]
    assert one["samples_per_second"] == pytest.approx(256e3 / one["iteration_ms"])
    assert {n for n in (r["nodes"] for r in found["curves"])} == {2**k for k in range(2, 13)}
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    text = run("-n", "2", *options[2:]).output
    assert "one-peer-hypercube" in text and "decentlam-steady" in text and "Not calibrated" in text


@pytest.mark.system
def test_predict_takes_other_models_late_nodes_and_a_calibration(tmp_path: Path):
    path = tmp_path / "constants.json"
    save_calibration(replace(Calibration(), overhead_seconds=1.0), path)
    late = run_json(
        "--parameters", "1000", "-n", "6", "--compute-ms", "10", "--straggler-ms", "5",
        "--overlap", "forward", "--calibration", str(path),
    )  # fmt: skip
    assert late["model_bytes"] == 4000
    assert late["rows"][0]["straggler_ms"] == pytest.approx(5)
    assert late["rows"][0]["exposed_ms"] == pytest.approx(1000, rel=0.01)
    some = benchmark(TRUTH, nodes=(4,))[::3]
    path.write_text(json.dumps([m.__dict__ for m in some]))
    fitted = run_json("--model", "squeezenet1_0", "--compute-ms", "10", "--calibration", str(path))
    assert fitted["model_bytes"] == 4 * 1_248_424 and "left out in turn" in fitted["notes"][0]


@pytest.mark.system
def test_predict_puts_the_paper_beside_itself():
    found = run_json("--paper")
    one_peer = [row["bipartite-random-match"] for row in found["rows"]]
    assert any(1.2 < speed_up < 1.9 for speed_up in one_peer)
    assert max(row["ring"] for row in found["rows"] if row["bandwidth_gbit"] == 10) < 1.2
    assert any(note.startswith("Assumed:") for note in found["notes"])
    assert "1.2 to 1.9" in run("--paper", "--compute-ms", "100").output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "Pass --compute-ms"),
        (("--compute-ms", "-1"), "must be 0 or more"),
        (("--compute-ms", "1", "--bandwidth", "25GB"), "such as 100Mbit, 1Gbit"),
        (("--compute-ms", "1", "--model", "nope"), ", ".join(MODELS)),
        (("--compute-ms", "1", "-n", "1"), "one node sends nothing"),
        (("--compute-ms", "1", "--overlap", "nope"), "none, backward, forward"),
        (("--compute-ms", "1", "--all-reduce", "nope"), "ring, halving"),
        (("--compute-ms", "1", "--stragglers", "nope"), "one, exponential"),
        (("--compute-ms", "1", "--parameters", "0"), "above 0"),
        (("--compute-ms", "1", "--batch", "0"), "--batch must be"),
        (("--compute-ms", "1", "--calibration", "nowhere"), "nowhere"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_2(arguments: tuple[str, ...], reason: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert reason in result.output and result.output.count("\n") == 1
