"""Work that must succeed on all processes: what fails on one is raised on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from decentlam.errors import CheckpointError
from decentlam.network.network import Network

T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (FileNotFoundError, TypeError, ValueError, MemoryError)}


def on_all_processes(network: Network, work: Callable[[], T]) -> T:
    """Return the result of work(), which must not communicate; raise the same error everywhere.

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
    raise _KINDS.get(kind, CheckpointError)(text) from failure


def on_process_0(network: Network, work: Callable[[], T]) -> T | None:
    """Do as `on_all_processes`, but only process 0 has something to do."""
    return on_all_processes(network, work if network.rank == 0 else lambda: None)


def _report(error: Exception) -> tuple[str, str]:
    """Return the name of the kind of error, and its text."""
    if type(error).__name__ in _KINDS and not (isinstance(error, OSError) and error.errno):
        return type(error).__name__, str(error) or repr(error)
    known = isinstance(error, OSError) or type(error) in (RuntimeError, CheckpointError)
    return "", str(error) if known else f"{type(error).__name__}: {error}"
