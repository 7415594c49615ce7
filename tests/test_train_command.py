"""`decentlam train` in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs_train import LONG
from trained import assert_close, records, write_images

from decentlam.lab.train import train

pytestmark = pytest.mark.timeout(300)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "decentlam", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ctrl_c_stops_a_local_process_with_a_checkpoint(tmp_path: Path):
    images = write_images(tmp_path / "images", ("train", "test"), classes=10, each=2, size=32)
    directory = tmp_path / "run"
    plan = ["--data", "cifar10", "--data-path", str(images), "-n", "1", "--batch", "4"]
    process = start(*plan, "--epochs", "100000", "--log-every", "1", "--out", str(directory))
    try:
        deadline = time.monotonic() + 120
        written = directory / "records.jsonl"
        while not (written.exists() and written.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "stopping after this step" in errors and "Traceback" not in errors
    assert f"decentlam train --resume --out {directory}" in errors
    last = records(directory)[-1]
    assert last["status"] == "interrupted" and last["step"] > 0
    meta = json.loads((directory / "checkpoint" / "meta.json").read_text())
    assert (meta["step"], meta["num_nodes"]) == (last["step"], 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_local_processes_train_diverge_and_refuse(tmp_path: Path):
    """`decentlam train` starts them itself; the records are those of the simulation."""
    changes = {k: v for k, v in LONG.as_json().items() if v not in (None, [], False)}
    options = [word for k, v in changes.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    directory = tmp_path / "run"
    process = start(*options, "--out", str(directory), "--json", "--quiet")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and not errors, errors
    assert json.loads(out)["status"] == "finished"
    train(LONG, tmp_path / "simulated", simulate=True)
    assert_close(directory, tmp_path / "simulated")

    wild = ["--lr", "1e200", "--nodes", "2", "--out", str(tmp_path / "wild"), "--quiet"]
    process = start(*options, *wild)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1 and errors.startswith("decentlam: diverged: node")
    assert errors.count("\n") == 1
    assert records(tmp_path / "wild")[-1]["status"] == "diverged"

    process = start(
        "--data", "imagenet", "--data-path", str(tmp_path), "--out", str(tmp_path / "no")
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and errors.startswith("decentlam: imagenet needs --data-path")
    assert errors.count("\n") == 1 and not (tmp_path / "no").exists()
