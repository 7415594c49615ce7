"""`launch(fn, nodes=4)`: a run on this machine from Python, without any launcher."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from decentlam.errors import ExchangeError, LaunchError, RunOverError
from decentlam.launch.environment import LAUNCHED, LOOPBACK
from decentlam.launch.processes import (
    Collect,
    Failure,
    Running,
    Started,
    next_reports,
    pickled,
    run_processes,
    variables,
)

log = logging.getLogger(__name__)

_RESTARTS = 100  # of all processes of an elastic run together
_NOTE_SECONDS = 60.0  # between two notes on who still works when others have ended


def launch(
    fn: Callable[..., Any],
    nodes: int,
    args: tuple[Any, ...] = (),
    backend: str = "gloo",
    timeout_seconds: float = 1800.0,
    *,
    elastic: bool = False,
) -> list[Any]:
    """Run fn(*args) in `nodes` processes on this machine that form one group; return their results.

    If one fails, the others are stopped and its traceback is raised. Arguments and results are
    copied. When this process ends, the nodes end too.

    Args:
        fn: A function at the top level of a module, or of a script that calls `launch` under
            `if __name__ == "__main__":`. A function from a notebook, `python -c` or standard input
            is refused, because other processes cannot import it.
        nodes: The number of processes.
        args: The arguments of `fn`.
        backend: gloo, or nccl with a GPU per process.
        timeout_seconds: The limit of the group's collectives.
        elastic: Restart a process that is killed; it joins the others, which continue meanwhile
            (docs/survive.md). Results are those of the processes that finished.
    """
    return run_here(fn, nodes, args, backend, timeout_seconds, survivors if elastic else None)


def run_here(
    fn: Callable[..., Any],
    nodes: int,
    args: tuple[Any, ...],
    backend: str = "gloo",
    timeout_seconds: float = 1800.0,
    elastic: Collect | None = None,
) -> list[Any]:
    """Do as `launch`; an elastic run's results are what `elastic` collects."""
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"nodes must be a whole number of 1 or more, got {nodes!r}")
    work = pickled(fn, args)  # refused before torch is imported, which takes long
    from decentlam.network.store import open_store

    store = open_store(LOOPBACK)
    shared = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHED: "1",
    }
    environments = [variables(rank, nodes, local=True) | shared for rank in range(nodes)]
    return run_processes(work, environments, backend, timeout_seconds, elastic=elastic)


def survivors(
    running: Running,
    start: Callable[[int], Started],
    note: Callable[[str], None] = log.warning,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Return the results of those that came to their end; none if `stopped()`.

    A process that is killed is started again and joins the others; so is one that was started
    again and did not get in. Any other exception ends the run.
    """
    pids = ", ".join(str(child.process.pid) for child in running.values())
    note(f"processes {pids}; the run survives as long as one of them does")
    results: list[Any] = []
    newcomers: list[int] = []  # ranks that were started again
    next_note = math.inf
    while running and not stopped():
        if time.monotonic() > next_note:
            next_note = time.monotonic() + _NOTE_SECONDS
            late = [f"{c.process.name} (process {c.process.pid})" for c in running.values()]
            note(f"{', '.join(late)} did not end yet; others have")
        for child, report in next_reports(running):
            name = child.process.name
            if not isinstance(report, Failure):
                results.append(report[0])
                child.let_leave()
                next_note = min(next_note, time.monotonic() + _NOTE_SECONDS)
            elif isinstance(report.error, RunOverError):
                continue
            elif not is_lost(report, newcomer=child.rank in newcomers):
                raise LaunchError(f"{name} {report.text}") from report.error
            else:
                why = f"failed: {report.error}" if report.error else report.text
                note(f"{name} (process {child.process.pid}) {why}; the others go on")
                if not results and len(newcomers) < _RESTARTS:
                    newcomers.append(child.rank)
                    again = start(child.rank).process.pid
                    note(f"{name} was started again as process {again}")
    if not results and not stopped():
        raise LaunchError("no process came to the end of the run")
    return results


def is_lost(failure: Failure, newcomer: bool) -> bool:
    """Return True if the others go on without it: it was killed, or it did not get in."""
    killed = failure.at == 0.0
    return killed or (newcomer and isinstance(failure.error, ExchangeError | LaunchError))
