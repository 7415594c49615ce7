"""Scripts that a framework's launcher starts in four processes, and what they must have left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.scripts import environment as environment

HERE = Path(__file__).parent
RANKS = range(4)
TOLERANCE = 1e-6
RAY_WAS_SLOW = "The current node timed out during startup"
# Ray waits a minute for the workers' resources.
PATIENCE = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--local-addr", "127.0.0.1", "--nproc-per-node", "4"),
]


def run(launcher: list[str], script: str, *arguments: Any, **variables: str) -> str:
    """Starts the script of this directory; it must end well."""
    env = environment(GLOO_SOCKET_IFNAME="lo", **variables)
    done = subprocess.run(
        [*launcher, str(HERE / script), *map(str, arguments)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def left(out: Path, name: str) -> list[Any]:
    """What each process saved under this name."""
    return [torch.load(out / f"{name}-{rank}.pt", weights_only=True) for rank in RANKS]


def assert_logged(names: list[str]) -> None:
    """What `decentlam.monitor` sees is among what a framework's logger gets."""
    assert {"decentlam/wait_seconds", "decentlam/bytes_sent", "decentlam/step_seconds"} <= {*names}


def assert_same_run(plain: list[Any], others: list[Any]) -> None:
    """Every node ended where the plain loop's did, and both saw the same loss in evaluation."""
    for ours, theirs in zip(plain, others, strict=True):
        assert (ours["x"] - theirs["x"]).abs().max() < TOLERANCE
        assert abs(ours["val"] - theirs["val"]) < TOLERANCE
    assert (plain[0]["x"] - plain[1]["x"]).abs().max() > 1e-4, "the nodes must differ"
