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
from tests.helpers.processes import HANG_SECONDS, wait_for
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


@pytest.mark.system
def test_launch_returns_results_in_rank_order_and_leaves_no_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = decentlam.launch(describe, nodes=2, args=(2.0, torch.zeros(2)))
    assert found == [(rank, 2.0, [float(rank)] * 2, True) for rank in range(2)]
    assert capfd.readouterr().err == ""


IN_NO_FILE = """
import sys, decentlam

def work(): pass

try:
    decentlam.launch(work, 2)
except ValueError as refused:
    print(refused)
assert "torch" not in sys.modules, "a refusal needs no seconds"
"""


@pytest.mark.parametrize("way", ["-c", "-"])
def test_what_is_defined_in_no_file_is_refused_with_the_cure(way: str) -> None:
    """As in a notebook, whose `__main__` has no file either."""
    command = [sys.executable, "-W", "error", way, *([IN_NO_FILE] if way == "-c" else [])]
    options = {"env": environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, input=IN_NO_FILE, timeout=HANG_SECONDS, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("other processes cannot import work: defined in a notebook")
    assert "Write the definitions to a file" in done.stdout


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
    children = multiprocessing.active_children()
    assert not [child.name for child in children if child.name.startswith("node")]


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
    open(f"{directory}/{os.getpid()}.pid", "w").close()
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
    process = fork(run_as_main, tmp_path / "output", str(script), str(tmp_path))
    assert process.pid is not None
    assert wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    os.kill(process.pid, number)
    process.join(HANG_SECONDS)
    assert process.exitcode
    assert wait_for(lambda: not any(alive(path.stem) for path in tmp_path.glob("*.pid")))


@pytest.mark.system
def test_an_elastic_launch_refuses_another_backend_than_gloo() -> None:
    with pytest.raises(LaunchError, match=r"elastic runs need the gloo backend, got 'nccl'"):
        decentlam.launch(time.sleep, 1, (0.0,), backend="nccl", elastic=True)
