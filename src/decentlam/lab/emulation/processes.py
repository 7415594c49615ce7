"""`run_on(hosts, fn)`: a function in one process per host, which form one gloo group."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from decentlam.lab.emulation.hosts import INTERFACE, Host
from decentlam.launch.reports import collect

_PORT = 29500  # every group of hosts is a network of its own
_STOP_SECONDS = 10.0
# Set by launchers for their own processes; a process in a namespace must not join those.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC_", "GLOO_")


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

    def exit_code(rank: int, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[rank].wait(seconds)
        return processes[rank].returncode

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
        results = collect(pipes, exit_code, "host", timeout_seconds=timeout_seconds)
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
