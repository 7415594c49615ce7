"""A function in processes of one group: everyone's result, or the failure that came first.

`decentlam.launch` and the lab's emulated hosts start their processes here. torch.multiprocessing
and concurrent.futures were not enough: the first has no results and reports whichever failure it
sees first, the second leaves its processes behind when their parent is killed.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any

from decentlam.errors import LaunchError

_POLL_SECONDS = 0.5  # between two looks for dead processes; others fail that soon after the first
_STOP_SECONDS = 5.0  # between asking a process to end and ending it
_EXIT_SECONDS = 60.0  # for processes that have returned to leave the group
_HINT = (
    " before it could report why; its output may say more. A script has to call launch under "
    '`if __name__ == "__main__":`.'
)


@dataclass(frozen=True, order=True)
class Failure:
    """What went wrong in a process; the earliest one is the cause of the others."""

    at: float  # on the clock that all processes of a machine share
    rank: int
    text: str
    error: BaseException | None = field(default=None, compare=False)  # None: could not be copied


def variables(rank: int, size: int, local: bool) -> dict[str, str]:
    """What torchrun tells a process of its place; `local`: all of them are on this host."""
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
) -> list[Any]:
    """The `pickled` function in a process per environment; results in their order.

    An environment has the variables that `init` joins the group by. `executables` start Python,
    each in its own way; none are `sys.executable`. Whoever fails first is named as `who` and its
    rank; if it raised an exception that can be copied, that is the error's cause.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank, environment in enumerate(environments):
            here, there = context.Pipe()
            pipes.append(here)
            process = context.Process(
                target=run_in_process,
                args=(there, work, rank, len(environments), environment, backend, timeout_seconds),
                name=f"{who} {rank}",
            )
            with there, _started_by(executables[rank] if executables else None):
                process.start()
            processes.append(process)
        results = _collect(pipes, processes, who, deadline_seconds)
        for pipe in pipes:
            let_leave(pipe)  # nobody needs anybody any more
        _join(processes, _EXIT_SECONDS)
        return results
    finally:
        for pipe in pipes:
            pipe.close()  # whoever is still there ends: see _watch
        stop(processes)


# The function on its way ------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Notes what is looked up in `__main__` by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            self.of_main.append(obj)
        return NotImplemented


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A function and its arguments, by value; refused if other processes cannot import it.

    Handed to multiprocessing as they are, tensors would be shared memory.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((fn, args))
    except Exception as error:
        raise ValueError(
            f"launch cannot hand {fn!r} and its arguments to other processes: {error}. Use a "
            "function defined at the top level of a module (no lambda, nothing nested) and "
            "arguments that pickle can copy."
        ) from error
    if pickler.of_main and not _main_is_a_file():
        names = ", ".join(dict.fromkeys(each.__qualname__ for each in pickler.of_main))
        raise ValueError(
            f"other processes cannot import {names}: defined in a notebook, at a prompt, in "
            "`python -c`, on standard input or in a package's __main__. Write the definitions to a "
            "file, such as work.py (in a notebook: %%writefile work.py), and import them from "
            "there; or make it a script and run `python -m decentlam.launch -n 4 work.py`."
        )
    return file.getvalue()


def _main_is_a_file() -> bool:
    """Whether multiprocessing imports `__main__` in a new process, and can."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.rpartition(".")[2] != "__main__"
    return os.path.isfile(getattr(main, "__file__", None) or "")


@contextmanager
def _started_by(executable: str | None) -> Iterator[None]:
    """While processes are started: by which Python, and without a `__main__` that is no file."""
    main, before = sys.modules["__main__"], spawn.get_executable()
    named = getattr(main, "__file__", None)
    hide = named is not None and not _main_is_a_file()  # "<stdin>", which no process can import
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


# In each process --------------------------------------------------------------------------------


def run_in_process(
    pipe: Connection,
    work: bytes,
    rank: int,
    size: int,
    environment: Mapping[str, str],
    backend: str,
    timeout_seconds: float,
    elastic: bool = False,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # being stopped must not lose output
    may_leave = threading.Event()
    threading.Thread(target=_watch, args=(pipe, may_leave), daemon=True).start()
    os.environ.update(environment)
    try:
        import torch

        from decentlam.launch.group import init

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        init(backend, timeout_seconds, elastic=elastic)
        fn, args = pickle.loads(work)
        report = pickle.dumps((fn(*args),))
    except BaseException as error:
        text = f"failed:\n{traceback.format_exc()}"
        failure = Failure(time.monotonic(), rank, text, _copied(error))
        pipe.send_bytes(pickle.dumps(failure))
        os._exit(1)  # peers see the closed connections at once instead of waiting
    pipe.send_bytes(report)
    may_leave.wait()  # until nobody can be waiting for something this process sent
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _watch(pipe: Connection, may_leave: threading.Event) -> None:
    """Ends this process when the one that started it is gone."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    may_leave.set()


def _copied(error: BaseException) -> BaseException | None:
    """The exception if its copy can be made where it is received; not every one can."""
    with suppress(Exception):
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    return None


# In the process that waits ----------------------------------------------------------------------


def _collect(
    pipes: list[Connection], processes: list[BaseProcess], who: str, deadline_seconds: float
) -> list[Any]:
    """Everyone's result in rank order. A process sends it in a tuple, or a Failure."""
    deadline = time.monotonic() + deadline_seconds
    results: list[Any] = [None] * len(pipes)
    failures: list[Failure] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        # A dead process's pipe can stay open, in the hands of its data loader's workers.
        dead = [pipe for pipe, rank in waiting.items() if not processes[rank].is_alive()]
        ready = dead or wait(list(waiting), _POLL_SECONDS)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            report = receive(pipe, rank, processes[rank])
            if isinstance(report, Failure):
                failures.append(report)
            else:
                (results[rank],) = report
        if failures and not ready:
            break
        if time.monotonic() > deadline:
            missing = ", ".join(map(str, sorted(waiting.values())))
            raise LaunchError(
                f"no result after {deadline_seconds:g} s from {who} {missing}; stopped"
            )
    if failures:
        first = min(failures)
        raise LaunchError(f"{who} {first.rank} {first.text}") from first.error
    return results


def receive(pipe: Connection, rank: int, process: BaseProcess) -> Any:
    with suppress(EOFError, ConnectionError):
        if pipe.poll():
            return pickle.loads(pipe.recv_bytes())
    process.join(_STOP_SECONDS)  # the end of its pipe comes a moment before its own
    code = process.exitcode
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    else:
        how = f"died with exit code {code}{_HINT}"
    return Failure(0.0, rank, how)  # the others only failed because this one had gone


def let_leave(pipe: Connection) -> None:
    """Tells a process that has reported to leave the group; it may have been killed since."""
    with suppress(OSError):
        pipe.send_bytes(b"")


def _join(processes: list[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def stop(processes: list[BaseProcess]) -> None:
    _join(processes, _STOP_SECONDS)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
