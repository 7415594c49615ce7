"""A function in processes of one group: everyone's result, or the failure that came first.

`decentlam.launch` and the lab's emulated hosts start their processes here. torch.multiprocessing
and concurrent.futures were not enough: the first has no results and reports whichever failure it
sees first, the second leaves its processes behind when their parent is killed.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from decentlam.errors import LaunchError
from decentlam.launch.remote_function import Failure, main_is_a_file, run_in_process

_POLL_SECONDS = 0.5  # between two looks for dead processes; others fail that soon after the first
_STOP_SECONDS = 5.0  # between asking a process to end and ending it
_EXIT_SECONDS = 60.0  # for processes that have returned to leave the group
_HINT = (
    " before it could report why; its output may say more. A script has to call launch under "
    '`if __name__ == "__main__":`.'
)


@dataclass(frozen=True)
class Started:
    """A process, and the end of the pipe that it reports through."""

    rank: int
    process: BaseProcess
    pipe: Connection

    def let_leave(self) -> None:
        """Tells a process that has reported to leave the group; it may have been killed since."""
        with suppress(OSError):
            self.pipe.send_bytes(b"")


Running = dict[Any, Started]  # who has not reported yet, by pipe
Collect = Callable[[Running, Callable[[int], Started]], list[Any]]  # can start a rank again


def variables(rank: int, size: int, local: bool) -> dict[str, str]:
    """Return what torchrun tells a process of its place; `local`: all of them are on this host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank if local else 0),
        "LOCAL_WORLD_SIZE": str(size if local else 1),
    }


def run_processes(
    work: bytes,
    environments: Sequence[Mapping[str, str]],
    backend: str,
    timeout_seconds: float,
    *,
    who: str = "node",
    executables: Sequence[str] | None = None,
    deadline_seconds: float = math.inf,
    elastic: Collect | None = None,
) -> list[Any]:
    """The `pickled` function in a process per environment; results in their order.

    An environment has the variables that `init` joins the group by. `executables` start Python,
    each in its own way; none are `sys.executable`. Whoever fails first is named as `who` and its
    rank; if it raised an exception that can be copied, that is the error's cause.
    `elastic` decides instead who is started again, and whose results count.
    """
    context = multiprocessing.get_context("spawn")
    started: list[Started] = []
    running: Running = {}

    def start(rank: int) -> Started:
        here, there = context.Pipe()
        process = context.Process(
            target=run_in_process,
            args=(there, work, environments[rank], backend, timeout_seconds, elastic is not None),
            name=f"{who} {rank}",
        )
        with there, _started_by(executables[rank] if executables else None):
            process.start()
        running[here] = Started(rank, process, here)
        started.append(running[here])
        return running[here]

    try:
        for rank in range(len(environments)):
            start(rank)
        return elastic(running, start) if elastic else _everyone(running, deadline_seconds)
    finally:
        for child in started:
            child.pipe.close()  # whoever was not let go ends: see `run_in_process`
        deadline = time.monotonic() + (_STOP_SECONDS if running else _EXIT_SECONDS)
        for child in started:
            child.process.join(max(0.0, deadline - time.monotonic()))
        for child in started:
            child.process.kill()
            child.process.join()


def _everyone(running: Running, deadline_seconds: float) -> list[Any]:
    """All results in rank order; a failure ends the run."""
    deadline = time.monotonic() + deadline_seconds
    processes = list(running.values())
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    while running:
        reports = next_reports(running)
        for child, report in reports:
            if isinstance(report, Failure):
                failures.append(report)
            else:
                (results[child.rank],) = report
        if failures and not reports:
            break
        if time.monotonic() > deadline:
            missing = ", ".join(child.process.name for child in running.values())
            raise LaunchError(f"no result after {deadline_seconds:g} s from {missing}; stopped")
    if failures:
        first = min(failures)
        name = processes[first.rank].process.name
        raise LaunchError(f"{name} {first.text}") from first.error
    for child in processes:
        child.let_leave()  # nobody needs anybody any more
    return [results[child.rank] for child in processes]


def next_reports(running: Running) -> list[tuple[Started, Any]]:
    """Return who has reported or died since, or does so soon: its result in a tuple, or a Failure.
    They run no more."""
    # A dead process's pipe can stay open, in the hands of its data loader's workers.
    dead = [pipe for pipe, child in running.items() if not child.process.is_alive()]
    ready = [running.pop(pipe) for pipe in dead or wait(list(running), _POLL_SECONDS)]
    return [(child, _receive(child)) for child in ready]


def _receive(child: Started) -> Any:
    with suppress(EOFError, ConnectionError):
        if child.pipe.poll():
            return pickle.loads(child.pipe.recv_bytes())
    child.process.join(_STOP_SECONDS)  # the end of its pipe comes a moment before its own
    code = child.process.exitcode
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    else:
        how = f"died with exit code {code}{_HINT}"
    return Failure(0.0, child.rank, how)  # the others only failed because this one had gone


@contextmanager
def _started_by(executable: str | None) -> Iterator[None]:
    """While processes are started: by which Python, and without a `__main__` that is no file."""
    main, before = sys.modules["__main__"], spawn.get_executable()
    named = getattr(main, "__file__", None)
    hide = named is not None and not main_is_a_file()  # "<stdin>", which no process can import
    if executable is not None:
        resource_tracker.ensure_running()  # a helper of multiprocessing, by the usual Python
        spawn.set_executable(executable)
    if hide:
        del main.__file__
    try:
        yield
    finally:
        if hide:
            main.__file__ = named
        spawn.set_executable(before)
