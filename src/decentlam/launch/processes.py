"""A function in processes of one group: everyone's result, or the failure that came first.

`decentlam.launch` and the lab's emulated hosts start their processes here. torch.multiprocessing
was not enough: it has no results, reports whichever failure it sees first, and cannot start one
process again.
"""

from __future__ import annotations

import ctypes
import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from decentlam.errors import LaunchError

_POLL_SECONDS = 0.5  # between two looks for dead processes; others fail that soon after the first
_EXIT_SECONDS = 60.0  # for processes that have returned to leave the group
_PR_SET_PDEATHSIG = 1
_HINT = (
    " before it could report why; its output may say more. A script has to call launch under "
    '`if __name__ == "__main__":`.'
)


@dataclass(frozen=True, order=True)
class Failure:
    """A failure in a process; the earliest one is the cause of the others."""

    at: float  # on the clock that all processes of a machine share; 0: it died without a word
    rank: int
    text: str
    error: BaseException | None = field(default=None, compare=False)  # None: could not be copied


@dataclass(frozen=True)
class Started:
    """A process, and the end of the pipe that it reports through."""

    rank: int
    process: BaseProcess
    pipe: Connection

    def let_leave(self) -> None:
        """Tell a process that has reported to leave the group; it may have been killed since."""
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


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a function and its arguments, by value; refuse what other processes cannot import.

    Handed to multiprocessing as they are, tensors would be shared memory.
    """
    try:
        work = pickle.dumps((fn, args))
    except Exception as error:
        raise ValueError(
            f"launch cannot hand {fn!r} and its arguments to other processes: {error}. Use a "
            "function defined at the top level of a module (no lambda, nothing nested) and "
            "arguments that pickle can copy."
        ) from error
    if fn.__module__ == "__main__" and not _main_is_a_file():
        raise ValueError(
            f"other processes cannot import {getattr(fn, '__name__', fn)}: defined in a notebook, "
            "at a prompt, in `python -c`, on standard input or in a package's __main__. Write the "
            "definitions to a file, such as work.py (in a notebook: %%writefile work.py), and "
            "import them from there; or make it a script and run `torchrun --nproc-per-node 4 "
            "work.py`."
        )
    return work


def _main_is_a_file() -> bool:
    """Return True if multiprocessing imports `__main__` in a new process, and can."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.rpartition(".")[2] != "__main__"
    return os.path.isfile(getattr(main, "__file__", None) or "")


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
    """Run the `pickled` function in a process per environment; return the results in their order.

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
            target=_run,
            args=(there, work, environments[rank], backend, timeout_seconds, elastic is not None),
            name=f"{who} {rank}",
        )
        resource_tracker.ensure_running()  # a helper of multiprocessing, by the usual Python
        spawn.set_executable(executables[rank] if executables else sys.executable)
        try:
            with there:
                process.start()
        finally:
            spawn.set_executable(sys.executable)
        running[here] = Started(rank, process, here)
        started.append(running[here])
        return running[here]

    try:
        for rank in range(len(environments)):
            start(rank)
        results = elastic(running, start) if elastic else _everyone(running, deadline_seconds)
        deadline = time.monotonic() + _EXIT_SECONDS
        for child in started:
            if child.pipe not in running:
                child.process.join(max(0.0, deadline - time.monotonic()))
        return results
    finally:
        for child in started:
            child.process.kill()
            child.process.join()
            child.pipe.close()


def _everyone(running: Running, deadline_seconds: float) -> list[Any]:
    """Return all results in rank order; a failure ends the run."""
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
    child.process.join(_EXIT_SECONDS)  # the end of its pipe comes a moment before its own
    code = child.process.exitcode
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    else:
        how = f"died with exit code {code}{_HINT}"
    return Failure(0.0, child.rank, how)  # the others only failed because this one had gone


# In each of the processes -------------------------------------------------------------------------


def _run(
    pipe: Connection,
    work: bytes,
    environment: Mapping[str, str],
    backend: str,
    timeout_seconds: float,
    elastic: bool,
) -> None:
    """Join the group and send what the function returns, or a Failure, through the pipe."""
    if sys.platform == "linux":  # end with the process that started this one
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # being stopped must not lose output
    os.environ.update(environment)
    try:
        import torch

        from decentlam.launch.init import init, leave

        if "OMP_NUM_THREADS" not in os.environ:
            share = (os.cpu_count() or 1) // int(environment["WORLD_SIZE"])
            torch.set_num_threads(max(1, share))
        init(backend, timeout_seconds, elastic=elastic)
        fn, args = pickle.loads(work)
        report = pickle.dumps((fn(*args),))
    except BaseException as error:
        text = f"failed:\n{traceback.format_exc()}"
        failure = Failure(time.monotonic(), int(environment["RANK"]), text, _copied(error))
        pipe.send_bytes(pickle.dumps(failure))
        os._exit(1)  # peers see the closed connections at once instead of waiting
    pipe.send_bytes(report)
    with suppress(EOFError):
        pipe.recv_bytes()  # until nobody can be waiting for something this process sent
    leave()


def _copied(error: BaseException) -> BaseException | None:
    """Return the exception if its copy can be made where it is received; not every one can."""
    with suppress(Exception):
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    return None
