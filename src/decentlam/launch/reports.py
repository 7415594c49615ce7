"""What processes send back over pipes: everyone's result, or the failure that came first."""

from __future__ import annotations

import math
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_LOOK_SECONDS = 0.5  # how often to look for dead processes; for so long a failure has echoes
_END_SECONDS = 5.0  # between the end of a process's pipe and its own

ExitCode = Callable[[int, float], int | None]  # of a rank, waited for so many seconds at most


@dataclass(frozen=True, order=True)
class Failure:
    """What went wrong in a process; the earliest one is the cause of the others."""

    at: float  # on the clock that all processes of a machine share
    rank: int
    text: str


def collect(
    pipes: list[Connection],
    exit_code: ExitCode,
    who: str,
    hint: str = "",
    timeout_seconds: float = math.inf,
) -> list[Any]:
    """Everyone's result in rank order; an error names the first to fail as `who` and its rank.

    A process sends its result in a tuple, or a Failure. `hint` follows the exit code of one that
    died without a word.
    """
    deadline = time.monotonic() + timeout_seconds
    results: list[Any] = [None] * len(pipes)
    failures: list[Failure] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        # A dead node's pipe can stay open, in the hands of its data loader's workers.
        ended = [pipe for pipe, rank in waiting.items() if exit_code(rank, 0.0) is not None]
        ready = ended or wait(list(waiting), _LOOK_SECONDS)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            report = _receive(pipe, rank, exit_code, hint)
            if isinstance(report, Failure):
                failures.append(report)
            else:
                (results[rank],) = report
        if failures and not ready:
            break
        if time.monotonic() > deadline:
            late = ", ".join(map(str, sorted(waiting.values())))
            raise RuntimeError(f"no result after {timeout_seconds:g} s from {who} {late}; stopped")
    if failures:
        first = min(failures)
        raise RuntimeError(f"{who} {first.rank} {first.text}")
    return results


def _receive(pipe: Connection, rank: int, exit_code: ExitCode, hint: str) -> Any:
    seconds = 0.0
    try:
        if pipe.poll():
            return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        seconds = _END_SECONDS
    code = exit_code(rank, seconds)
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    else:
        how = f"died with exit code {code}{hint}"
    return Failure(0.0, rank, how)  # the others only failed because this one had gone
