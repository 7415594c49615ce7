"""`decentlam predict`: its table, and bad input."""

from __future__ import annotations

import pytest

from decentlam.lab.models import MODELS
from tests.lab.commands.running import run, run_json


@pytest.mark.system
def test_predict_prints_the_time_of_a_step_for_every_way_to_train():
    options = ("-n", "8", "--bandwidth", "10Gbit", "--compute-ms", "100")
    found = run_json("predict", *options)
    assert found["model_bytes"] == 25_557_032 * 4
    rows = {(row["method"], row["topology"], row["message_bits"]): row for row in found["rows"]}
    first = found["rows"][0]
    assert first["topology"] == "all-reduce" and first["speed_up"] == 1
    assert first["sent_MB"] == pytest.approx(102.228128 * 1.75)
    one = rows["decentlam", "bipartite-random-match", 32]
    assert one["sent_MB"] == pytest.approx(102.228128)
    assert one["speed_up"] > rows["decentlam", "ring", 32]["speed_up"]
    half = rows["decentlam", "bipartite-random-match", 16]
    assert half["wire_ms"] == pytest.approx(one["wire_ms"] / 2, rel=0.02)
    early = rows["awc-dmsgd", "one-peer-exponential", 32]
    assert early["step_ms"] < one["step_ms"] == pytest.approx(100 + one["exposed_ms"])
    unhidden = run_json("predict", *options, "--overlap", "none")["rows"]
    assert all(row["exposed_ms"] == row["wire_ms"] for row in unhidden)
    text = run("predict", *options).output
    assert "bipartite-random-match" in text and "25,557,032 parameters" in text
    assert "39 %" in text  # its error


@pytest.mark.system
def test_predict_takes_other_models():
    assert run_json("predict", "--parameters", "1000", "--compute-ms", "10")["model_bytes"] == 4000
    other = run_json("predict", "--model", "squeezenet1_0", "--compute-ms", "10")
    assert other["model_bytes"] == 4 * 1_248_424


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "Pass --compute-ms"),
        (("--compute-ms", "-1"), "must be 0 or more"),
        (("--compute-ms", "1", "--bandwidth", "25GB"), "such as 100Mbit, 1Gbit"),
        (("--compute-ms", "1", "--model", "nope"), ", ".join(MODELS)),
        (("--compute-ms", "1", "-n", "1"), "one node sends nothing"),
        (("--compute-ms", "1", "--overlap", "forward"), "none, backward"),
        (("--compute-ms", "1", "--parameters", "0"), "above 0"),
        (("--compute-ms", "1", "--latency-us", "-5"), "--latency-us must be"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_2(arguments: tuple[str, ...], reason: str):
    result = run("predict", *arguments)
    assert result.exit_code == 2
    assert reason in result.output and result.output.count("\n") == 1
