"""Every way to start a run, for real: torchrun on several hosts, mpirun, srun, by hand."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from launching import JOIN, assert_trained, environment, finish, fork, start, training

from decentlam.lab import emulation

BY_HAND = {
    "openmpi": lambda rank, port: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"{port}",  # the job's number, which the port is made from
    },
    "mpich": lambda rank, port: {
        "PMI_RANK": rank,
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": rank,
        "MPI_LOCALNRANKS": "2",
        "MASTER_PORT": f"{port}",
    },
    "slurm": lambda rank, port: {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": rank,
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": f"{port}",
        "SLURM_STEP_ID": "0",
    },
}


def join() -> None:
    exec(JOIN)


def free_port() -> int:
    """Below those that the system gives to whoever connects: nobody takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.mark.parametrize("launcher", BY_HAND)
def test_variables_of_other_launchers_are_enough(launcher: str, tmp_path: Path) -> None:
    port = free_port()
    processes = [
        fork(join, tmp_path / str(rank), **BY_HAND[launcher](str(rank), port)) for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        process.join(runs.HANG_SECONDS)
        assert process.exitcode == 0
        assert (tmp_path / str(rank)).read_text() == f"{rank}/2\n"


def test_mpirun_for_real() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, "-c", JOIN]
    ((out, _),) = finish(start(command))
    assert "0/2" in out and "1/2" in out  # mpirun may run lines together


@pytest.mark.system
@pytest.mark.netns
@pytest.mark.parametrize("meets_at", ["name", pytest.param("address", marks=pytest.mark.slow)])
def test_torchrun_on_two_hosts(meets_at: str, tmp_path: Path) -> None:
    """By name is the hard case: on its own host the name of process 0's host is 127.0.1.1."""
    reason = emulation.unavailable()
    if reason is not None:
        pytest.skip(f"no second host: {reason}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    with emulation.hosts(2) as hosts:
        there = getattr(hosts[0], meets_at)
        agents = [
            host.start(
                [
                    *torchrun,
                    f"--node-rank={i}",
                    f"--master-addr={there}",
                    *training(tmp_path, "never"),
                ],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for i, host in enumerate(hosts)
        ]
        finish(*agents)
    assert_trained(tmp_path, 4)


@pytest.mark.netns
def test_namespaces_are_removed_after_a_failure_and_with_the_processes_inside() -> None:
    reason = emulation.unavailable()
    if reason is not None:
        pytest.skip(f"no second host: {reason}")
    with pytest.raises(KeyboardInterrupt), emulation.hosts(2) as hosts:
        sleeper = hosts[1].start(["sleep", "600"])
        raise KeyboardInterrupt
    assert sleeper.wait(runs.HANG_SECONDS) == -signal.SIGKILL
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"dlam-{os.getpid()}" not in listed
    assert not list(Path("/etc/netns").glob(f"dlam-{os.getpid()}*"))


RESTARTED = """
import os, signal, sys
import torch, decentlam

decentlam.init()
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
model = torch.nn.Linear(3, 1)
optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, topology="ring")
for step in range(4):
    if attempt == "0" and rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
open(os.path.join(sys.argv[1], f"{rank} {attempt}"), "w").close()
"""


@pytest.mark.system
def test_processes_that_torchrun_starts_again_find_each_other(tmp_path: Path) -> None:
    """Its store still has the addresses of those that are gone."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    finish(start([*torchrun, "--nproc-per-node=2", str(script), str(tmp_path)]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0 1", "1 1", "script.py"]
