"""What this process waits for, so that a long wait is explained while it lasts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SECONDS = 10.0  # after which a wait is worth a line; then after twice that, and so on


@dataclass(frozen=True)
class Wait:
    """One wait for others."""

    what: str  # such as "step 41" or "average the model"
    whom: Callable[[], list[str]]  # who has not answered yet
    begun: float


_wait: Wait | None = None
_last = "has not begun to train"  # what this process did before it waited for anybody
_told = SECONDS


def begin(what: str, whom: Callable[[], list[str]]) -> None:
    """Note that this process begins to wait."""
    global _wait, _told
    _wait, _told = Wait(what, whom, time.monotonic()), SECONDS


def end() -> None:
    """Note that everybody has answered."""
    global _wait, _last
    if _wait is not None:
        _last, _wait = f"has finished {_wait.what}", None


@contextlib.contextmanager
def for_everyone(what: str) -> Iterator[None]:
    """Inside, this process waits for all others to make the same call."""
    begin(f"the call to {what}", lambda: ["all processes"])
    try:
        yield
    finally:
        end()


def doing() -> str:
    """Return what this process does, for others that wait for it."""
    return _last if _wait is None else f"waits in {_wait.what}"


def overdue() -> tuple[Wait, float] | None:
    """Return a wait that has become so long that it is time for a line, and its seconds."""
    global _told
    wait = _wait
    if wait is None or (seconds := time.monotonic() - wait.begun) < _told:
        return None
    _told = 2 * seconds
    return wait, seconds
