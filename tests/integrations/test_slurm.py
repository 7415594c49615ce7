"""The batch file for SLURM, and the variables that srun sets on several hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from decentlam.lab import network
from tests.helpers.scripts import assert_trained, environment, finish, training

pytestmark = pytest.mark.timeout(600)

BATCH = Path(__file__).parents[2] / "examples" / "train.sbatch"

# Not SLURM, but the two things of it that the batch file leans on: srun starts every task with the
# variables of its place, and fails if a task does.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 64
shift
tasks=()
for rank in 0 1 2 3; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_ID=0 "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


def slurm(rank: int, local: int, hosts: int, nodes: str) -> Mapping[str, str]:
    """What srun sets for a task of a job of four, as SLURM's manual lists it."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": str(hosts),
        "SLURM_STEP_NUM_NODES": str(hosts),
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_CPUS_PER_TASK": "1",
    }


def test_the_batch_file_starts_every_task(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    job = {k: v for k, v in slurm(0, 0, 1, "localhost").items() if k != "SLURM_STEP_ID"}
    env = environment(**job, ENVIRONMENT="BATCH")
    env["PATH"] = f"{tools}:{env['PATH']}"
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{':'.join(p for p in sys.path if p)}"
    finish(
        subprocess.Popen(
            ["bash", str(BATCH), *training(tmp_path, "never")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ),
        seconds=500,
    )
    assert_trained(tmp_path, 4)


@pytest.mark.netns
def test_tasks_of_srun_meet_on_two_hosts(tmp_path: Path) -> None:
    """By the name of the first host, which on that host itself is 127.0.1.1."""
    reason = network.unavailable()
    if reason is not None:
        pytest.skip(f"no second host: {reason}")
    with network.hosts(2) as hosts:
        nodes = ",".join(host.name for host in hosts)
        tasks = [
            host.start(
                [sys.executable, *training(tmp_path, "never")],
                env=environment(**slurm(2 * i + local, local, 2, nodes)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for i, host in enumerate(hosts)
            for local in range(2)
        ]
        finish(*tasks, seconds=500)
    assert_trained(tmp_path, 4)
