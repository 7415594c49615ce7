"""Work that must succeed on all processes: what fails on one is raised on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from decentlam.errors import CheckpointError
from decentlam.exchange.network import Network

T = TypeVar("T")


def together(network: Network, work: Callable[[], T]) -> T:
    """The result of work(), which must not communicate; the same error everywhere if it fails.

    Without this the process that failed would leave, and the others would wait for it.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    reports = network.gather(None if failure is None else _report(failure))
    failed = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return cast(T, result)
    rank, kind, text = failed[0]
    if len(failed) < network.num_processes:
        others = f" (and {len(failed) - 1} more)" if failed[1:] else ""
        text = f"process {rank}{others}: {text}"
    raise kind(text) from failure


def _report(error: Exception) -> tuple[type[Exception], str]:
    for kind in (FileNotFoundError, CheckpointError, ValueError):
        if type(error) is kind and not (isinstance(error, OSError) and error.errno):
            return kind, str(error)
    if type(error) is RuntimeError:
        return CheckpointError, str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"
