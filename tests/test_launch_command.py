"""`python -m decentlam.launch`: exit codes passed on, and nothing outlives the launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import runs
from launching import alive, assert_trained, finish, fork, run_as_main, start, training

from decentlam.launch.__main__ import main
from decentlam.launch.script import _report

pytestmark = pytest.mark.system

QUICK = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}  # seconds that a stubborn process is waited for


def test_command_trains_without_init(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "decentlam.launch", "-n", "2"]
    ((out, err),) = finish(start([*command, *training(tmp_path, "never")]))
    assert_trained(tmp_path, 2)
    assert out == err == ""


PROCESSES = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[2]
if what == "print":
    for line in range(200):
        print(rank, "a" * 60, "b" * 60)
    from beside import value  # the script's directory is searched, as in `python script.py`
    sys.exit(value)
open(f"{sys.argv[1]}/{rank}.tmp", "w").write(str(os.getpid()))
os.rename(f"{sys.argv[1]}/{rank}.tmp", f"{sys.argv[1]}/{rank}.pid")
while len([name for name in os.listdir(sys.argv[1]) if name.endswith(".pid")]) < 3:
    time.sleep(0.01)
if rank == 1 and what == "exit":
    sys.exit(3)
if rank == 1 and what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "raise":
    try:  # the others just after it has ended: torchrun looks ten times a second and sees them all
        first = open(f"{sys.argv[1]}/1.pid").read()
        while rank != 1 and open(f"/proc/{first}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
    except OSError:  # it is gone
        pass
    raise ValueError(f"of process {rank}")
if rank == 0 and what == "sleep":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stubborn one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(PROCESSES)
    (tmp_path / "beside.py").write_text("value = 0")
    return path


def command(script: Path, what: str) -> tuple[BaseProcess, Path]:
    """`python -m decentlam.launch` with three processes, and the file of what they write."""
    out = script.parent / "output"
    arguments = ["-n", "3", str(script), str(script.parent), what]
    return fork(main, out, arguments, PYTHONUNBUFFERED="1", **QUICK), out


def test_lines_of_different_processes_do_not_mix(script: Path) -> None:
    process, out = command(script, "print")
    process.join(runs.HANG_SECONDS)
    assert process.exitcode == 0
    lines = [f"{rank} {'a' * 60} {'b' * 60}" for rank in range(3) for _ in range(200)]
    assert sorted(out.read_text().splitlines()) == lines


def test_an_error_is_reported_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun may read it at any time; an empty file made it fail with an error of its own."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    _report("first")
    writing = threading.Thread(target=lambda: [_report("x" * 1_000_000) for _ in range(30)])
    writing.start()
    while writing.is_alive():
        assert json.loads(path.read_text())["message"][0] in "fx"
    writing.join()


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("exit", 3, ["process 1 of 3 exited with code 3"]),
        ("kill", 128 + 9, ["process 1 of 3 was killed by SIGKILL"]),
        ("raise", 1, ["process 1 of 3 exited with code 1", "[1] ValueError: of process 1\n"]),
    ],
)
def test_command_stops_all_and_passes_the_exit_code_on(
    what: str, code: int, words: list[str], script: Path
) -> None:
    process, out = command(script, what)
    process.join(runs.HANG_SECONDS)
    err = out.read_text()
    assert process.exitcode == code, err
    for text in words:
        assert text in err
    assert "runpy" not in err, "a traceback begins in the user's script"
    _assert_gone(script.parent, 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_command(number: int, script: Path) -> None:
    process, out = command(script, "sleep")
    assert process.pid is not None
    _wait_for(3, script.parent)
    os.kill(process.pid, number)
    process.join(runs.HANG_SECONDS)
    _assert_gone(script.parent, 3)
    if number != signal.SIGKILL:
        assert process.exitcode == 128 + number
        assert "Traceback" not in out.read_text()


SLEEPERS = """
import os, sys, time, decentlam, torch.distributed as dist

def sleep(directory):
    target = f"{directory}/{dist.get_rank()}"
    open(f"{target}.tmp", "w").write(str(os.getpid()))
    os.rename(f"{target}.tmp", f"{target}.pid")
    time.sleep(600)

if __name__ == "__main__":
    decentlam.launch(sleep, nodes=2, args=(sys.argv[1],))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_script_that_calls_launch(number: int, script: Path) -> None:
    """The function is the script's own: a file can be imported by others."""
    script.write_text(SLEEPERS)
    process = fork(run_as_main, script.parent / "output", str(script), str(script.parent))
    assert process.pid is not None
    _wait_for(2, script.parent)
    os.kill(process.pid, number)
    process.join(runs.HANG_SECONDS)
    assert process.exitcode
    _assert_gone(script.parent, 2)


def _wait_for(count: int, directory: Path) -> None:
    deadline = time.monotonic() + runs.HANG_SECONDS
    while len(list(directory.glob("*.pid"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _assert_gone(directory: Path, count: int) -> None:
    pids = [path.read_text() for path in directory.glob("*.pid")]
    assert len(pids) == count
    deadline = time.monotonic() + runs.HANG_SECONDS
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if alive(p)]}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", __file__], "must be 1 or more"),
        (["-n", "2", "absent.py"], "there is no script"),
    ],
)
def test_command_refuses_what_cannot_run(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
