"""`decentlam train` in processes of its own: stopped, killed, on local nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
    assert "stopping after this step" in errors and "Traceback" not in errors
    assert f"decentlam train --resume --out {directory}" in errors
    last = records(directory)[-1]
    assert last["status"] == "interrupted" and last["step"] > 0
    saves = sorted((directory / "checkpoint").iterdir())
    meta = json.loads((saves[-1] / "process-00000.json").read_text())
    assert (meta["step"], meta["num_nodes"]) == (last["step"], int(nodes))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.slow
def test_a_node_that_is_killed_leaves_a_checkpoint_to_go_on_from(tmp_path: Path):
    images = write_images(tmp_path / "images", ("train", "test"), classes=10, each=2, size=32)
    directory = tmp_path / "run"
    saves, written = directory / "checkpoint", directory / "records.jsonl"

    def saved() -> list[Path]:
        return sorted(saves.glob("*-step-*[0-9]")) if saves.exists() else []

    plan = ["--data", "cifar10", "--data-path", str(images), "-n", "2", "--batch", "8"]
    plan += ["--epochs", "100000", "--log-every", "1", "--evaluate-every", "2"]
    with start(*plan, "--out", str(directory)) as process:
        try:
            wait_for(lambda: len(saved()) > 1, process)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
            victim = [pid for pid, command in commands.items() if b"spawn_main" in command][1]
            os.kill(int(victim), signal.SIGKILL)
            _, errors = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 1, errors
    assert "node 1 was killed by SIGKILL" in errors and "Traceback" not in errors
    steps = [int(save.name.rpartition("-")[2]) for save in saved()]
    lines = written.read_text().splitlines()
    with start("--resume", "--out", str(directory)) as process:
        try:
            wait_for(lambda: written.read_text().splitlines()[: len(lines)] != lines, process)
            wait_for(lambda: records(directory)[-1]["step"] > max(steps), process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    found = records(directory, "step")
    assert [record["step"] for record in found] == list(range(1, len(found) + 1))  # none is missing
    assert len(found) > max(steps)
