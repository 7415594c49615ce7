"""`decentlam train` in processes of its own: stopped, killed, on local nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import HANG_SECONDS
from tests.lab.data.images import write_images
from tests.lab.helpers import records

pytestmark = pytest.mark.system


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "decentlam", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a process group of its own
    )


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM to all"])
def test_being_stopped_keeps_a_checkpoint_of_the_last_step(how: str, tmp_path: Path):
    """Ctrl-C reaches the command; `timeout`, SLURM and containers reach loaders and nodes, too."""
    images = write_images(tmp_path / "images", ("train", "test"), classes=10, each=2, size=32)
    directory = tmp_path / "run"
    nodes, batch = ("1", "4") if how == "Ctrl-C" else ("2", "8")
    plan = ["--data", "cifar10", "--data-path", str(images), "-n", nodes, "--batch", batch]
    plan += ["--workers", "0" if how == "Ctrl-C" else "1", "--evaluate-every", "100"]
    process = start(*plan, "--epochs", "100000", "--log-every", "1", "--out", str(directory))
    with process:
        try:
            deadline = time.monotonic() + HANG_SECONDS
            written = directory / "records.jsonl"
            while not (written.exists() and written.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.05)
            if how == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            else:
                os.killpg(process.pid, signal.SIGTERM)
            _, errors = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):  # nobody is left
        for _ in range(600):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    assert process.returncode == 130, errors
    assert "stopping with the next step record" in errors and "Traceback" not in errors
    assert f"decentlam train --resume --out {directory}" in errors
    last = records(directory)[-1]
    assert last["status"] == "interrupted" and last["step"] > 0
    saves = sorted((directory / "checkpoint").iterdir())
    meta = json.loads((saves[-1] / "process-00000.json").read_text())
    assert (meta["step"], meta["num_nodes"]) == (last["step"], int(nodes))
