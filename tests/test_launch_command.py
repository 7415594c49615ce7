"""`python -m decentlam.launch`: exit codes passed on, and nothing outlives the launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launching import assert_trained, finish, start, training

pytestmark = pytest.mark.timeout(240)  # starting a process takes seconds on a busy machine


COMMAND = [sys.executable, "-W", "error", "-m", "decentlam.launch"]


def test_command_trains_without_init(tmp_path: Path) -> None:
    ((out, err),) = finish(start([*COMMAND, "-n", "2", *training(tmp_path, "never")]))
    assert_trained(tmp_path, 2)
    assert out == err == ""


PROCESSES = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[2]
print(f"hello from {rank} of {os.environ['WORLD_SIZE']}")
open(f"{sys.argv[1]}/{rank}.tmp", "w").write(str(os.getpid()))
os.rename(f"{sys.argv[1]}/{rank}.tmp", f"{sys.argv[1]}/{rank}.pid")
if rank == 1 and what == "exit":
    print("going down", file=sys.stderr)
    sys.exit(3)
if rank == 1 and what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stubborn one
time.sleep(600)
"""

SLEEPERS = """
import sys, decentlam, test_launch_command
if __name__ == "__main__":
    decentlam.launch(test_launch_command.sleep, nodes=2, args=(sys.argv[1],))
"""


def sleep(directory: str) -> None:
    target = Path(directory) / f"{dist.get_rank()}.pid"
    target.with_suffix(".tmp").write_text(str(os.getpid()))
    target.with_suffix(".tmp").rename(target)
    time.sleep(600)


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("exit", 3, ["process 1 of 3 exited with code 3", "[1] going down"]),
        ("kill", 128 + 9, ["process 1 of 3 was killed by SIGKILL"]),
    ],
)
def test_command_stops_all_and_passes_the_exit_code_on(
    what: str, code: int, words: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    process = start([*COMMAND, "-n", "3", str(script), str(tmp_path), what])
    out, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert "hello from 1 of 3\n" in out and "[1]" not in out
    for text in words:
        assert text in err
    _assert_gone(tmp_path)


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("command", signal.SIGINT),
        pytest.param("command", signal.SIGTERM, marks=pytest.mark.slow),
        ("command", signal.SIGKILL),
        ("function", signal.SIGINT),
        ("function", signal.SIGKILL),
    ],
)
def test_nothing_outlives_the_launcher(way: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESSES if way == "command" else SLEEPERS)
    command = [*COMMAND, "-n", "2"] if way == "command" else [sys.executable]
    process = start([*command, str(script), str(tmp_path), "sleep"])
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    _assert_gone(tmp_path)
    if way == "command" and number != signal.SIGKILL:
        assert process.returncode == 128 + number


def _assert_gone(directory: Path) -> None:
    pids = [path.read_text() for path in directory.glob("*.pid")]
    assert pids
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if _runs(p)]}"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", __file__], "must be 1 or more"),
        (["-n", "2", "absent.py"], "there is no script"),
    ],
)
def test_command_refuses_what_cannot_run(arguments: list[str], message: str, capsys: Any) -> None:
    from decentlam.launch.__main__ import main

    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
