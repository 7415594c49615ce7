"""`launch(fn, nodes=4)`: a run on this machine from Python, without any launcher."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from decentlam.launch.group import choose_interface, use_device
from decentlam.launch.place import LOOPBACK
from decentlam.launch.reports import Failure, collect

_STOP_SECONDS = 5.0  # between asking a process to end and ending it
_WITHOUT_A_WORD = (
    " and without a word; its output may say more. A script has to call launch under "
    '`if __name__ == "__main__":`.'
)


def launch(
    fn: Callable[..., Any],
    nodes: int,
    args: tuple[Any, ...] = (),
    backend: str = "gloo",
    timeout_seconds: float = 1800.0,
) -> list[Any]:
    """Runs fn(*args) in `nodes` local processes that form one group; returns their results.

    If one fails, the others are stopped and its traceback is raised. `fn` must be importable,
    arguments and results travel by value. The meeting point lives in this process, so that the
    death of any node leaves it standing. When this process ends, however it ends, so do they.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"nodes must be a whole number of 1 or more, got {nodes!r}")
    try:
        work = pickle.dumps((fn, args))  # by value: tensors would otherwise be shared memory
    except Exception as error:
        raise ValueError(
            f"launch cannot hand {fn!r} and its arguments to other processes: {error}. Use a "
            "function defined at the top level of a module (no lambda, nothing nested) and "
            "arguments that pickle can copy."
        ) from error
    store = dist.TCPStore(
        LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []

    def exit_code(rank: int, seconds: float) -> int | None:
        processes[rank].join(seconds)
        return processes[rank].exitcode

    try:
        for rank in range(nodes):
            here, there = context.Pipe()
            pipes.append(here)
            process = context.Process(
                target=_run,
                args=(there, work, rank, nodes, store.port, backend, timeout_seconds),
                name=f"node {rank}",
            )
            process.start()
            there.close()
            processes.append(process)
        results = collect(pipes, exit_code, "node", _WITHOUT_A_WORD)
        for pipe in pipes:
            pipe.send_bytes(b"")  # nobody needs anybody any more: leave the group
        _join(processes, 60.0)
        return results
    finally:
        _stop(processes)
        for pipe in pipes:
            pipe.close()


def _join(processes: list[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    _join(processes, _STOP_SECONDS)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _run(
    pipe: Connection,
    work: bytes,
    rank: int,
    nodes: int,
    port: int,
    backend: str,
    timeout_seconds: float,
) -> None:
    """The life of one local process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # being stopped must not swallow output
    may_leave = threading.Event()
    threading.Thread(target=_watch, args=(pipe, may_leave), daemon=True).start()
    try:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // nodes))
        if backend == "nccl":
            use_device(rank)
        choose_interface(LOOPBACK, one_host=True)
        dist.init_process_group(
            backend,
            store=dist.TCPStore(LOOPBACK, port, is_master=False),
            rank=rank,
            world_size=nodes,
            timeout=timedelta(seconds=timeout_seconds),
        )
        fn, args = pickle.loads(work)
        report = pickle.dumps((fn(*args),))
    except BaseException:
        text = f"failed:\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps(Failure(time.monotonic(), rank, text)))
        os._exit(1)  # peers see the closed connections at once instead of waiting
    pipe.send_bytes(report)
    may_leave.wait()  # until nobody can be waiting for something this node sent
    if dist.is_initialized():
        dist.destroy_process_group()


def _watch(pipe: Connection, may_leave: threading.Event) -> None:
    """Ends this process when the one that launched it is gone."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    may_leave.set()
