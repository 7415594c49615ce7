"""`launch(fn, nodes)`: results in rank order, failures named, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import decentlam
from decentlam.errors import LaunchError
from tests.helpers.processes import HANG_SECONDS
from tests.helpers.scripts import alive, environment, fork, run_as_main


def describe(scale: float, mine: torch.Tensor) -> tuple[int, float, list[float], bool]:
    """Rank, an all-reduce, an argument that only this node changed, room for data loaders."""
    rank = dist.get_rank()
    total = torch.tensor([scale * rank])
    dist.all_reduce(total)
    mine += rank
    dist.barrier()
    may_have_workers = not multiprocessing.current_process().daemon
    return rank, total.item(), mine.tolist(), may_have_workers


def python(code: str, way: str) -> subprocess.CompletedProcess[str]:
    """Runs code that is in no file."""
    command = [sys.executable, "-W", "error", *(["-c", code] if way == "-c" else ["-"])]
    return subprocess.run(
        command,
        input=code,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


LAUNCHES = """
import torch, decentlam
from tests.launch import test_local as test_launch
print(decentlam.launch(test_launch.describe, nodes=2, args=(2.0, torch.zeros(2))))
"""


@pytest.mark.system
def test_launch_returns_results_in_rank_order_and_leaves_no_warning() -> None:
    """From standard input, too, which multiprocessing alone would try to import as a file."""
    done = python(LAUNCHES, "stdin")
    assert done.stdout.strip() == str([(r, 2.0, [float(r)] * 2, True) for r in range(2)])
    assert done.stderr == ""


IN_NO_FILE = """
import sys, decentlam

def work(): pass
class Model: pass

for fn, args in ((work, ()), (print, (Model(),))):
    try:
        decentlam.launch(fn, 2, args)
    except ValueError as refused:
        print(refused)
assert "torch" not in sys.modules, "a refusal needs no seconds"
"""


@pytest.mark.parametrize("way", ["-c", "stdin"])
def test_what_is_defined_in_no_file_is_refused_with_the_cure(way: str) -> None:
    """As in a notebook, whose `__main__` has no file either."""
    done = python(IN_NO_FILE, way)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith("other processes cannot import work: defined in a notebook")
    assert second.startswith("other processes cannot import Model: ")
    assert "Write the definitions to a file" in first


def fail(how: str) -> None:
    """Node 1 fails; node 0 does not notice, or fails in its turn a moment later."""
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("no luck on node one")
        if os.fork() == 0:  # a data loader's worker, which keeps the pipe open
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        dist.all_reduce(torch.zeros(1))
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "message", "cause"),
    [
        ("raise", r"(?s)node 1 failed:.*in fail.*ValueError: no luck on node one", ValueError),
        pytest.param(
            "kill",
            r"node 1 was killed by SIGKILL \(exit code -9\)",
            type(None),
            marks=pytest.mark.system,
        ),
    ],
)
def test_the_node_that_failed_first_is_named_and_all_are_stopped(
    how: str, message: str, cause: type
) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        decentlam.launch(fail, nodes=2, args=(how,))
    assert type(raised.value.__cause__) is cause
    assert _children() == []


def _children() -> list[str]:
    """Processes started by this one that still run, other than multiprocessing's own helpers."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in found]
    helpers = ("resource_tracker", "forkserver")  # the second is left by other test files
    return [c for c in commands if c.strip() and not any(name in c for name in helpers)]


def test_what_cannot_be_sent_to_a_process_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)lambda.*top level of a module"):
        decentlam.launch(lambda: None, nodes=2)
    with pytest.raises(ValueError, match="arguments that pickle can copy"):
        decentlam.launch(describe, nodes=2, args=((x for x in ()),))
    for wrong in (0, -1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="nodes must be a whole number"):
            decentlam.launch(describe, nodes=wrong)  # type: ignore[arg-type]


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
@pytest.mark.system
def test_nothing_outlives_the_script_that_calls_launch(number: int, tmp_path: Path) -> None:
    """The function is the script's own: a file can be imported by others."""
    script = tmp_path / "script.py"
    script.write_text(SLEEPERS)
    process = fork(run_as_main, script.parent / "output", str(script), str(script.parent))
    assert process.pid is not None
    _wait_for(2, script.parent)
    os.kill(process.pid, number)
    process.join(HANG_SECONDS)
    assert process.exitcode
    _assert_gone(script.parent, 2)


def _wait_for(count: int, directory: Path) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while len(list(directory.glob("*.pid"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _assert_gone(directory: Path, count: int) -> None:
    pids = [path.read_text() for path in directory.glob("*.pid")]
    assert len(pids) == count
    deadline = time.monotonic() + HANG_SECONDS
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if alive(p)]}"
        time.sleep(0.05)


@pytest.mark.system
def test_an_elastic_launch_refuses_another_backend_than_gloo() -> None:
    with pytest.raises(LaunchError, match=r"elastic runs need the gloo backend, got 'nccl'"):
        decentlam.launch(time.sleep, 1, (0.0,), backend="nccl", elastic=True)


def run_out_of_memory() -> None:
    decentlam.init()
    if dist.get_rank() == 1:
        torch.empty(1 << 50)
    dist.barrier()


@pytest.mark.system
def test_no_memory_on_one_node_is_named_and_ends_all() -> None:
    with pytest.raises(decentlam.LaunchError, match="node 1 failed") as caught:
        decentlam.launch(run_out_of_memory, 2)
    assert isinstance(caught.value.__cause__, RuntimeError)
