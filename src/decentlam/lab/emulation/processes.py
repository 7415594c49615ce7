"""`run_on(hosts, fn)`: a function in one process per host, which form one gloo group."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from decentlam.lab.emulation.hosts import INTERFACE, Host

_PORT = 29500  # every group of hosts is a network of its own
_LOOK_SECONDS = 0.5  # how often to look for dead processes; for so long a failure has echoes
_STOP_SECONDS = 10.0
# Set by launchers for their own processes; a process in a namespace must not join those.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC_", "GLOO_")


@dataclass(frozen=True, order=True)
class Failure:
    """What went wrong on a host; the earliest one is the cause of the others."""

    at: float  # on the clock that all processes of a machine share
    rank: int
    text: str


def run_on(
    hosts: list[Host],
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    timeout_seconds: float = 600.0,
) -> list[Any]:
    """Runs fn(*args) on every host; returns their results in the order of the hosts.

    If one fails, or takes longer than `timeout_seconds`, all are stopped and the first traceback
    is raised. `fn` must be importable, arguments and results travel by value. Processes end with
    the one that started them, however it ends.
    """
    if fn.__module__ == "__main__" or "<" in fn.__qualname__:
        raise ValueError(f"{fn!r} must be at the top level of a module that others can import")
    work = pickle.dumps((fn, args))
    pipes: list[Connection] = []
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(hosts):
            here, there = Pipe()
            pipes.append(here)
            command = [sys.executable, "-m", "decentlam.lab.emulation.worker", str(there.fileno())]
            with there:
                processes.append(
                    host.start(
                        command,
                        env=_environment(rank, hosts),
                        pass_fds=(there.fileno(),),
                        start_new_session=True,  # Ctrl-C reaches only us, and we stop everyone
                    )
                )
            here.send_bytes(work)
        results = _collect(pipes, processes, timeout_seconds)
        for pipe in pipes:
            pipe.send_bytes(b"")  # nobody needs anybody any more: leave the group
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
        return results
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in pipes:
            pipe.close()


def _environment(rank: int, hosts: list[Host]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    return {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch misses a name server, which nobody needs here
        **kept,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def _collect(
    pipes: list[Connection], processes: list[subprocess.Popen[str]], timeout_seconds: float
) -> list[Any]:
    """Everyone's result in rank order, or the failure that came first."""
    deadline = time.monotonic() + timeout_seconds
    results: list[Any] = [None] * len(pipes)
    failures: list[Failure] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ended = [pipe for pipe, rank in waiting.items() if processes[rank].poll() is not None]
        ready = ended or wait(list(waiting), _LOOK_SECONDS)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            report = _receive(pipe, rank, processes[rank])
            if isinstance(report, Failure):
                failures.append(report)
            else:
                (results[rank],) = report
        if failures and not ready:
            break
        if time.monotonic() > deadline:
            late = ", ".join(map(str, sorted(waiting.values())))
            raise RuntimeError(f"no result after {timeout_seconds:g} s from host {late}; stopped")
    if failures:
        first = min(failures)
        raise RuntimeError(f"host {first.rank} {first.text}")
    return results


def _receive(pipe: Connection, rank: int, process: subprocess.Popen[str]) -> Any:
    try:
        if pipe.poll():
            return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    code = process.returncode
    killed = code is not None and code < 0
    how = f"was killed by {signal.Signals(-code).name}" if killed else f"died with exit code {code}"
    return Failure(0.0, rank, how)  # the others only failed because this one had gone
