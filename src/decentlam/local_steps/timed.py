"""Averages after a time instead of a number of steps: for machines that are not equally fast."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from decentlam.algorithms import shown
from decentlam.exchange.base import Terms

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}


def seconds_of(every: Any) -> float | None:
    """Return the seconds that "2s" or "500ms" means, or None for a number of steps."""
    if not isinstance(every, str):
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min)\s*", every)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if seconds <= 0:
        raise ValueError(
            f"every must be a number of steps, or a time above 0 such as '2s' or '500ms', got "
            f"{shown(every)}"
        )
    return seconds


def in_background(wait: Callable[[], None]) -> Future[None]:
    """Wait for messages in a thread, so that the script can go on: gloo tells of what has been
    received only to who waits for it. An executor's thread would keep the process from ending."""
    arrival: Future[None] = Future()

    def run() -> None:
        try:
            wait()
            arrival.set_result(None)
        except BaseException as error:
            arrival.set_exception(error)

    threading.Thread(target=run, name="decentlam messages", daemon=True).start()
    return arrival


def weighted(terms: Terms, own: float, theirs: Sequence[float]) -> Terms:
    """Return the terms of a mix in which every node counts as often as it took steps.

    The last of them may be the node's own message, rounded, which is taken off again.
    """
    (_, message), *others = terms
    weights = [weight for weight, _ in others[: len(theirs)]]
    kept = (1.0 - sum(weights)) * own
    pulls = [weight * count for weight, count in zip(weights, theirs, strict=True)]
    total = kept + sum(pulls)
    if total == 0:
        return terms
    shares = [pull / total for pull in pulls]
    rounded = others[len(theirs) :]
    mixed: Terms = [(1.0 if rounded else 1.0 - sum(shares), message)]
    mixed += [(share, tensor) for share, (_, tensor) in zip(shares, others, strict=False)]
    return mixed + [(-sum(shares), tensor) for _, tensor in rounded]
