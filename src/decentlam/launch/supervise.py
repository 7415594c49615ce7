"""An elastic run on this machine: who dies is started again, and joins the others."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from decentlam.errors import ExchangeError, LaunchError, RunOverError
from decentlam.launch.place import LAUNCHED, LOOPBACK
from decentlam.launch.processes import (
    Failure,
    let_leave,
    pickled,
    receive,
    run_in_process,
    stop,
    variables,
)

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_NOTE_SECONDS = 60.0  # between two notes on who still works when others have ended


def supervise(
    fn: Callable[..., Any],
    nodes: int,
    args: tuple[Any, ...] = (),
    *,
    restarts: int = 100,
    note: Callable[[str], None] = log.warning,
    stopped: Callable[[], bool] = lambda: False,
    timeout_seconds: float = 1800.0,
) -> list[Any]:
    """Runs fn(*args) in `nodes` local processes that have called `decentlam.init(elastic=True)`.

    A process that is killed is started again, at most `restarts` times in all, and joins the
    others; so is one that was started again and did not get in. Any other exception ends the run.
    Results of those that came to their end; none if `stopped()`. The store is in this process,
    which does not train.
    """
    work = pickled(fn, args)
    from decentlam.membership.spare import open_store

    store = open_store(LOOPBACK)
    shared = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHED: "1",
    }
    context = multiprocessing.get_context("spawn")
    started: list[BaseProcess] = []
    running: dict[Connection, tuple[int, BaseProcess]] = {}

    def start(rank: int) -> BaseProcess:
        here, there = context.Pipe()
        environment = variables(rank, nodes, local=True) | shared
        process = context.Process(
            target=run_in_process,
            args=(there, work, rank, nodes, environment, "gloo", timeout_seconds, True),
            name=f"node {rank}",
        )
        with there:
            process.start()
        started.append(process)
        running[here] = (rank, process)
        return process

    results: list[Any] = []
    next_note = math.inf
    newcomers: set[int] = set()  # ranks that were started again
    try:
        pids = [start(rank).pid for rank in range(nodes)]
        note(f"processes {', '.join(map(str, pids))}; the run survives as long as one of them does")
        while running and not stopped():
            if time.monotonic() > next_note:
                next_note = time.monotonic() + _NOTE_SECONDS
                note(f"{_wake(running.values())} did not end yet; others have")
            ready = [pipe for pipe, (_, process) in running.items() if not process.is_alive()]
            for pipe in ready or wait(list(running), _LOOK_SECONDS):
                assert isinstance(pipe, Connection)
                rank, process = running.pop(pipe)
                report = receive(pipe, rank, process)
                if not isinstance(report, Failure):
                    results.append(report[0])
                    let_leave(pipe)
                    next_note = min(next_note, time.monotonic() + _NOTE_SECONDS)
                    continue
                if isinstance(report.error, RunOverError):
                    continue
                if not is_lost(report, newcomer=rank in newcomers):
                    raise RuntimeError(f"node {rank} {report.text}") from report.error
                why = f"failed: {report.error}" if report.error else report.text
                note(f"node {rank} (process {process.pid}) {why}; the others go on")
                if not results and restarts > 0:
                    restarts -= 1
                    newcomers.add(rank)
                    note(f"node {rank} was started again as process {start(rank).pid}")
        if not results and not stopped():
            raise RuntimeError("no process came to the end of the run")
        return results
    finally:
        for pipe in running:
            pipe.close()  # whoever is still there ends
        stop(started)


def is_lost(failure: Failure, newcomer: bool) -> bool:
    """Whether the others go on without it: it was killed, or it did not get in."""
    killed = failure.at == 0.0
    return killed or (newcomer and isinstance(failure.error, ExchangeError | LaunchError))


def _wake(running: Iterable[tuple[int, BaseProcess]]) -> str:
    """The processes that still run, by name. Those that were stopped go on: the others gave them
    up, and they would keep the launcher waiting."""
    named = []
    for rank, process in running:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        named.append(f"node {rank} (process {process.pid})")
    return ", ".join(named)
