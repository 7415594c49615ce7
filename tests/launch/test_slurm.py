"""The batch file for SLURM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.scripts import assert_trained, environment, finish, training

pytestmark = pytest.mark.system

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


# What srun and sbatch set, as SLURM's manual lists it.
JOB = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_CPUS_PER_TASK": "1",
    "ENVIRONMENT": "BATCH",
}


def test_the_batch_file_starts_every_task(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    env = environment(**JOB)
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
