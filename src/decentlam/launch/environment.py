"""What a launcher says in the environment: which process this is and where process 0 listens."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
LAUNCHED = "DECENTLAM_LAUNCHED"  # by a launcher of ours on this machine, which has the store
_DEFAULT_PORT = 29500

# Launcher; rank; number of processes; rank and number of processes on this host. The first
# variable that is set counts. mpirun and srun can both be at work in one job: mpirun is inside.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    (
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    (
        "mpirun (MPICH)",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), ()),
)


@dataclass(frozen=True)
class LaunchedProcess:
    """The place that a launcher gave this process."""

    launcher: str
    rank: int
    num_processes: int
    local_rank: int
    one_host: bool | None  # whether all processes are on this host; None: the launcher is silent


def launched_process(environment: Mapping[str, str] | None = None) -> LaunchedProcess | None:
    """Return what torchrun, Open MPI, MPICH / Intel MPI or srun put in the environment, or None."""
    env = os.environ if environment is None else environment
    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        if rank not in env or size not in env:
            continue
        if launcher == "srun" and in_batch_script(env):
            continue
        number, num_processes = _number(env, (rank,), 0), _number(env, (size,), 1)
        if not 0 <= number < num_processes:
            raise ValueError(f"the environment has {rank}={number} and {size}={num_processes}")
        on_this_host: int | None = _number(env, local_size, 0) or None
        if launcher == "srun" and _number(env, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), 0) == 1:
            on_this_host = num_processes
        return LaunchedProcess(
            launcher,
            number,
            num_processes,
            _number(env, local_rank, number),
            None if on_this_host is None else on_this_host == num_processes,
        )
    return None


def in_batch_script(env: Mapping[str, str]) -> bool:
    """Return True if this is the script given to sbatch itself: SLURM counts tasks there, too.

    Nobody else runs the script, so joining the job's tasks would wait for processes that never
    come. srun, inside the script, sets SLURM_STEP_ID.
    """
    return env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env


def meeting_point(
    process: LaunchedProcess, environment: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Return host and port of process 0: MASTER_ADDR and MASTER_PORT, or what the job tells."""
    env = os.environ if environment is None else environment
    port = _number(env, ("MASTER_PORT",), _port_of_job(env))
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], port
    if process.one_host or (process.one_host is None and process.launcher.startswith("mpirun")):
        return LOOPBACK, port
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in env:
            return first_host(env[name]), port
    raise RuntimeError(
        f"{process.launcher} started {process.num_processes} processes, not all on this host; set "
        "MASTER_ADDR (and MASTER_PORT) to a host and port that process 0 can listen on"
    )


def _port_of_job(env: Mapping[str, str]) -> int:
    """Return the same on all processes of a job, and another for two jobs that share a host.

    Below 32768, where the system takes the ports of outgoing connections from.
    """
    job = env.get("PMIX_NAMESPACE") or env.get("SLURM_JOB_ID")
    if job is None:
        return _DEFAULT_PORT
    return 20000 + zlib.crc32(f"{job}.{env.get('SLURM_STEP_ID', '')}".encode()) % 12000


def first_host(nodes: str) -> str:
    """Return the first name of a SLURM node list.

    >>> first_host("gpu[03-05,9],login1"), first_host("alpha,beta")
    ('gpu03', 'alpha')
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"cannot read the SLURM node list {nodes!r}; set MASTER_ADDR instead")
    return match[1] + (match[2] or "") + (match[3] or "")


def _number(env: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if name in env:
            try:
                return int(env[name])
            except ValueError:
                raise ValueError(
                    f"the environment has {name}={env[name]!r}, which is not a whole number"
                ) from None
    return default
