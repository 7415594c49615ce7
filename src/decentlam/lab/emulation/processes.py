"""`run_on(hosts, fn)`: a function in one process per host, which form one gloo group."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decentlam.lab.emulation.hosts import INTERFACE, Host
from decentlam.launch.processes import run_processes, variables
from decentlam.launch.work import pickled

_PORT = "29500"  # every group of hosts is a network of its own
_GROUP_TIMEOUT_SECONDS = 120.0


def run_on(
    hosts: list[Host],
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    timeout_seconds: float = 600.0,
) -> list[Any]:
    """Runs fn(*args) on every host; returns their results in the order of the hosts.

    As `decentlam.launch` does on one machine, and with its errors; beyond `timeout_seconds` all
    are stopped, too.
    """
    work = pickled(fn, args)
    environments = [
        variables(rank, len(hosts), local=False)
        | {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": _PORT,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # the store is process 0's
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        for rank in range(len(hosts))
    ]
    with tempfile.TemporaryDirectory() as directory:
        return run_processes(
            work,
            environments,
            "gloo",
            _GROUP_TIMEOUT_SECONDS,
            who="host",
            executables=[_python(host, Path(directory)) for host in hosts],
            deadline_seconds=timeout_seconds,
        )


def _python(host: Host, directory: Path) -> str:
    """A program that is this Python on the host."""
    path = directory / host.namespace
    # torch misses a name server, which nobody needs here.
    command = ["env", "TORCH_CPP_LOG_LEVEL=ERROR", *host.command([sys.executable])]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return str(path)
