"""Groups of processes for distributed tests: many scenarios share one group."""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import decentlam.runtime.bucket

# For a wait that ends long before, unless something hangs; shorter than pytest's own limit.
HANG_SECONDS = 500.0
HANG = timedelta(seconds=HANG_SECONDS)
Group = dist.ProcessGroup

# The fork server has torch already, which costs a new interpreter seconds. One list for all test
# files, because the server that the first of them starts serves the rest. The first optimizer of a
# process would import torch._dynamo.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "torch.distributed.run",
        "sklearn.model_selection",
        "decentlam.lab.train",
        "decentlam.launch.init",
    ]
)


def leave_fork_server() -> None:
    """Let a process of the fork server start its own children by fork, not by a server each."""
    multiprocessing.set_start_method("fork", force=True)


# Many scenarios in one group of processes -------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """What a scenario that raised leaves behind in one process."""

    text: str


Scenario = tuple[str, Callable[..., Any], dict[str, Any]]


class Scenarios:
    """What one group of processes runs, one after the other, once a result is asked for.

    The functions are top-level functions of a test module, which the processes import.
    """

    def __init__(self, processes: int, own_group: bool = True) -> None:
        self.processes = processes
        self._own_group = own_group
        self._listed: list[Scenario] = []

    def add(self, name: str, function: Callable[..., Any], **arguments: Any) -> None:
        self._listed.append((name, function, arguments))

    def run(
        self, function: Callable[..., Any], cases: Sequence[dict[str, Any]] = ({},)
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorate a test that reads what the function returns in every process.

        The test is called for each case, with the list of results and what it wants of the case.
        """

        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            wanted = inspect.signature(test).parameters
            names = [f"{function.__name__} {case}" for case in cases]
            for name, case in zip(names, cases, strict=True):
                if all(name != listed for listed, _, _ in self._listed):
                    self.add(name, function, **case)

            def read(number: int) -> None:
                given = {k: v for k, v in cases[number].items() if k in wanted}
                test(self.outcomes(names[number]), **given)

            read.__name__, read.__doc__ = test.__name__, test.__doc__
            read.__module__ = test.__module__
            ids = ["-".join(str(value) for value in case.values()) or "all" for case in cases]
            return pytest.mark.parametrize("number", range(len(cases)), ids=ids)(read)

        return decorate

    def outcomes(self, name: str) -> list[Any]:
        """The results of one scenario in all processes; an error there is an error here."""
        for rank, results in enumerate(self._everyone):
            if not isinstance(results, dict):
                raise AssertionError(f"process {rank} did not come to an end: {results!r}")
            result = results.get(name, Failure("not reached, because one before it failed"))
            if isinstance(result, Failure):
                raise AssertionError(f"process {rank}, {name}: {result.text}")
        return [results[name] for results in self._everyone]

    @cached_property
    def _everyone(self) -> list[Any]:
        return run_processes(run_scenarios, self.processes, (self._listed, self._own_group))


def run_scenarios(scenarios: Sequence[Scenario], own_group: bool) -> dict[str, Any]:
    """Run them one after the other in this process; return {name: result or Failure}.

    With `own_group` each gets `process_group=`, a group of its own, so that what one leaves
    broken, as a test of an error does, cannot reach the next. Without, the first failure ends it.
    """
    results: dict[str, Any] = {}
    for name, function, arguments in scenarios:
        if own_group:
            arguments = {**arguments, "process_group": dist.new_group(timeout=HANG)}
        try:
            results[name] = function(**arguments)
        except Exception:
            results[name] = Failure(traceback.format_exc())
            if not own_group:
                break
        if own_group:
            dist.barrier()
            dist.destroy_process_group(arguments["process_group"])
    return results


def every(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return all combinations of the values, as cases."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def slow_if(slow: bool, *values: Any) -> Any:
    """A case of a parametrized test, with the mark `slow` or without."""
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


# Processes that may die -------------------------------------------------------------------------


def run_processes(
    function: Callable[..., Any], n: int, args: tuple[Any, ...] = (), seconds: float = HANG_SECONDS
) -> list[Any]:
    """Call function(*args) in n processes of one group: results, or exit codes of the dead.

    Unlike decentlam.launch it leaves the survivors of a death alone; only who is still there
    after `seconds` is killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(n):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, function, args, rank, n, store.port)
        process = context.Process(target=_child, args=arguments)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    deadline = time.monotonic() + seconds
    results: list[Any] = []
    for pipe, process in zip(pipes, processes, strict=True):
        try:
            arrived = pipe.poll(max(0.0, deadline - time.monotonic()))
            results.append(pickle.loads(pipe.recv_bytes()) if arrived else "killed: too slow")
        except EOFError:
            process.join(HANG_SECONDS)
            results.append(process.exitcode)
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return results


@contextlib.contextmanager
def store_elsewhere() -> Iterator[tuple[int, dist.Store]]:
    """A store in a process of its own, whose number is the first of the two."""
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,))
    process.start()
    assert process.pid is not None
    yield process.pid, dist.TCPStore("127.0.0.1", here.recv(), is_master=False)
    process.kill()
    process.join()


def _serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _child(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    n: int,
    port: int,
) -> None:
    leave_fork_server()
    torch.set_num_threads(1)
    decentlam.runtime.bucket._LARGE = 10  # so that small models have gradients of both kinds
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=HANG)
    pipe.send_bytes(pickle.dumps(function(*args)))


def wait_for(condition: Callable[[], bool]) -> bool:
    """Return the condition as soon as it is true, or when a test must not wait any longer."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def message_of(action: Callable[[], Any]) -> str:
    """Return the type and text of the error that the action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def spoiled(
    process_group: Group, attempt: Callable[[Group, float], tuple[str, bool]], step: int
) -> tuple[str, bool]:
    """Return what attempt(group, timeout_seconds) does: the error of a run that one process spoils
    at this step, and what else it saw. On a busy machine a neighbor that is well may be slower than
    a short timeout; then all try again with a longer one."""
    errors: list[Any] = [None] * dist.get_world_size()
    for seconds in (1.0, 10.0, 50.0):
        found = attempt(process_group, seconds)
        dist.all_gather_object(errors, found[0])
        early = any(f"step {k}, " in error for error in errors for k in range(step))
        if not early and any(error.startswith("NonFiniteError") for error in errors):
            break
        process_group = dist.new_group(timeout=HANG)
    return found


@contextlib.contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """Collect what a logger of the library warns of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)
