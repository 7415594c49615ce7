"""What an algorithm will need of the network over a whole run."""

from __future__ import annotations

from decentlam.algorithms.base import Algorithm, Reach

_LONGEST_PERIOD = 10_000  # steps within which an algorithm does whatever it ever does


def always_everyone(algorithm: Algorithm) -> bool:
    return all(algorithm.reach(k) is Reach.EVERYONE for k in (0, 1))


def sometimes_everyone(algorithm: Algorithm) -> bool:
    return any(algorithm.reach(k) is Reach.EVERYONE for k in range(_LONGEST_PERIOD))


def most_payloads(algorithm: Algorithm) -> int:
    """Of a message to neighbors."""
    steps = [k for k in range(_LONGEST_PERIOD) if algorithm.reach(k) is Reach.NEIGHBORS]
    return max((algorithm.payloads(k) for k in steps), default=1)
