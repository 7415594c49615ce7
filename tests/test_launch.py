"""`launch(fn, nodes)`: results in rank order, failures named, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import finish, start

import decentlam

pytestmark = pytest.mark.timeout(240)  # starting a process takes seconds on a busy machine


def describe(scale: float, mine: torch.Tensor) -> tuple[int, float, list[float], bool]:
    """Rank, an all-reduce, an argument that only this node changed, room for data loaders."""
    rank = dist.get_rank()
    total = torch.tensor([scale * rank])
    dist.all_reduce(total)
    mine += rank
    dist.barrier()
    may_have_workers = not multiprocessing.current_process().daemon
    return rank, total.item(), mine.tolist(), may_have_workers


LAUNCHES = """
import torch, decentlam, test_launch
if __name__ == "__main__":
    print(decentlam.launch(test_launch.describe, nodes=2, args=(2.0, torch.zeros(2))))
"""


def test_launch_returns_results_in_rank_order_and_leaves_no_warning(tmp_path: Path) -> None:
    script = tmp_path / "launches.py"
    script.write_text(LAUNCHES)
    ((out, err),) = finish(start([sys.executable, "-W", "error", str(script)]))
    assert out.strip() == str([(r, 2.0, [float(r)] * 2, True) for r in range(2)])
    assert err == ""


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
    ("how", "message"),
    [
        ("raise", r"(?s)node 1 failed:.*in fail.*ValueError: no luck on node one"),
        ("kill", r"node 1 was killed by SIGKILL \(exit code -9\)"),
    ],
)
def test_the_node_that_failed_first_is_named_and_all_are_stopped(how: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        decentlam.launch(fail, nodes=2, args=(how,))
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
