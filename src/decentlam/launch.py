"""Starting a run: torchrun, mpirun and SLURM are recognised, `launch` needs none of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process."""

    launcher: str
    rank: int
    num_processes: int
    local_rank: int


def find_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """What torchrun, Open MPI, MPICH / Intel MPI or SLURM say in the environment, or None."""
    env = os.environ if environment is None else environment
    for launcher, rank, size, local in (
        ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
         "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):  # fmt: skip
        if rank in env and size in env:
            return Place(launcher, int(env[rank]), int(env[size]), int(env.get(local, 0)))
    return None


def init(backend: str | None = None, timeout_seconds: float = 1800.0) -> None:
    """Joins the process group that the launcher described; does nothing if already joined.

    The backend is NCCL when the process has a GPU, else gloo. mpirun and srun do not say where
    process 0 listens: MASTER_ADDR and MASTER_PORT are read, or worked out for one host and for
    SLURM.
    """
    if dist.is_initialized():
        return
    place = find_place()
    if place is None:
        raise RuntimeError(
            "no launcher found: neither torchrun (RANK, WORLD_SIZE), mpirun nor srun set the "
            "environment. Start with `torchrun --nproc-per-node 4 script.py`, or from Python "
            "with decentlam.launch(fn, nodes=4)."
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    host, port = _meeting_point(os.environ, place)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    dist.init_process_group(
        backend,
        rank=place.rank,
        world_size=place.num_processes,
        timeout=timedelta(seconds=timeout_seconds),
    )


def init_if_launched(device: torch.device) -> None:
    """Joins the launcher's process group if the script did not: nobody trains alone unawares."""
    if not dist.is_available() or dist.is_initialized():
        return
    place = find_place()
    if place is None or place.num_processes == 1:
        return
    log.info("joining %d processes started by %s", place.num_processes, place.launcher)
    init("nccl" if device.type == "cuda" else "gloo")


def _meeting_point(env: Mapping[str, str], place: Place) -> tuple[str, int]:
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], int(env.get("MASTER_PORT", 29500))
    if "SLURM_JOB_NODELIST" in env or "SLURM_NODELIST" in env:
        nodes = env.get("SLURM_JOB_NODELIST") or env["SLURM_NODELIST"]
        job = int(env.get("SLURM_JOB_ID", env.get("SLURM_JOBID", 0)))
        return first_host(nodes), int(env.get("MASTER_PORT", 20000 + job % 20000))
    if place.launcher.startswith("mpirun"):
        local = env.get("OMPI_COMM_WORLD_LOCAL_SIZE", env.get("MPI_LOCALNRANKS"))
        if local is None or int(local) == place.num_processes:
            return _LOOPBACK, int(env.get("MASTER_PORT", 29500))
    raise RuntimeError(
        f"{place.launcher} started {place.num_processes} processes on several hosts; set "
        "MASTER_ADDR (and MASTER_PORT) to a host and port that process 0 can listen on"
    )


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list.

    >>> first_host("gpu[03-05,9],login1"), first_host("alpha,beta")
    ('gpu03', 'alpha')
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"cannot read the SLURM node list {nodes!r}; set MASTER_ADDR instead")
    return match[1] + (match[2] or "") + (match[3] or "")


def launch(
    fn: Callable[..., Any],
    nodes: int,
    args: tuple[Any, ...] = (),
    backend: str = "gloo",
    timeout_seconds: float = 1800.0,
) -> list[Any]:
    """Runs fn(*args) in `nodes` local processes that form one group; returns their results.

    If one fails, the others are stopped and its traceback is raised. `fn` must be importable.
    The meeting point lives in this process, so that the death of any node leaves it standing.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"nodes must be a whole number of 1 or more, got {nodes!r}")
    store = dist.TCPStore(
        _LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    context = multiprocessing.get_context("spawn")
    pipes: dict[Connection, int] = {}
    processes = []
    results: list[Any] = [None] * nodes
    try:
        for rank in range(nodes):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(there, fn, args, rank, nodes, store.port, backend, timeout_seconds),
                daemon=True,
            )
            process.start()
            there.close()
            processes.append(process)
            pipes[here] = rank
        while pipes:
            for ready in wait(list(pipes)):
                assert isinstance(ready, Connection)
                rank = pipes.pop(ready)
                results[rank] = _receive(ready, rank, processes[rank])
    finally:
        for process in processes:
            if pipes:  # somebody failed: the others would wait for it
                process.terminate()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    return results


def _receive(pipe: Connection, rank: int, process: Any) -> Any:
    try:
        failed, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(10)
        raise RuntimeError(f"node {rank} died with exit code {process.exitcode}") from None
    if failed:
        raise RuntimeError(f"node {rank} failed:\n{value}")
    return value


def _run(
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    nodes: int,
    port: int,
    backend: str,
    timeout_seconds: float,
) -> None:
    """The life of one local process."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // nodes))
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore(_LOOPBACK, port, is_master=False)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=nodes,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        pipe.send_bytes(pickle.dumps((False, fn(*args))))  # by value: no shared memory to lose
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, traceback.format_exc())))
        os._exit(1)  # peers see the closed connection at once instead of waiting
    dist.barrier()
    dist.destroy_process_group()
