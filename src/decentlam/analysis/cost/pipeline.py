"""One iteration as a pipeline: buckets leave backward, cross the wire, are updated and used.

Bucket 0 holds the last layers: backward finishes it first, forward needs it last. The wire takes
one bucket at a time. All nodes do the same at the same time, so that one clock is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decentlam.analysis.cost.values import OVERLAPS


@dataclass(frozen=True)
class Timeline:
    """How long an iteration takes, and how much later messages may come without prolonging it."""

    seconds: float
    slack: float


def timeline(
    forward: float,
    backward: float,
    update: float,
    wire: Sequence[float],
    latency: float = 0.0,
    overlap: str = "backward",
    shares: Sequence[float] | None = None,
) -> Timeline:
    """The time between two iterations whose bucket i occupies the wire for wire[i] seconds.

    A bucket arrives `latency` after it has left the wire. Forward, backward and update are spread
    evenly over the buckets, or by their `shares`. `overlap` says when messages leave, and when they
    are awaited:

    - "none": all leave after backward, the update awaits them;
    - "backward": each leaves when its gradient is ready, the update awaits them;
    - "forward": the same, and each is awaited and updated just before the next forward needs it.
      The wire then prefers the first layers among the buckets that are ready: in the order of
      backward, the layers that forward needs first would arrive last, and nothing more be hidden;
    - "iteration": they hold no gradient (AWC), leave after the update, and the next awaits them.

    >>> timeline(1.0, 2.0, 0.0, [1.0, 1.0], overlap="none").seconds
    5.0
    >>> [timeline(1.0, 2.0, 0.0, [1.0, 1.0], overlap=o).seconds for o in OVERLAPS[1:]]
    [4.0, 4.0, 3.0]
    """
    count = len(wire)
    _check(overlap)
    if count == 0 or (not any(wire) and latency == 0):
        return Timeline(forward + backward + update, np.inf)
    share = np.full(count, 1 / count) if shares is None else np.asarray(shares) / sum(shares)
    done = backward * np.cumsum(share)  # after backward's start
    occupied = np.asarray(wire, dtype=float)
    if overlap == "forward":
        sent = _newest_first(done, occupied) + latency
        return Timeline(*_await(backward, sent[::-1], (update + forward) * share[::-1]))
    ready = {"none": np.full(count, backward), "backward": done}.get(overlap, np.full(count, 0.0))
    before = forward if overlap == "iteration" else 0.0  # messages that travel during forward too
    sent = _in_turn(ready, occupied) + latency
    end, slack = _await(before + backward, sent, update * share)
    return Timeline(end + forward - before, slack)


def least(
    forward: float,
    backward: float,
    update: float,
    wire: Sequence[float],
    overlap: str = "backward",
    shares: Sequence[float] | None = None,
    late: float = 0.0,
) -> float:
    """The time between two iterations that no schedule can beat, in whatever order the wire takes
    the buckets and however it cuts them; `late` seconds pass between forward and backward.

    Take bucket i and all that backward completes after it. None of them leaves before the gradient
    of i is complete ("none": before backward is over), so that the last of their bytes has passed
    the wire sum_{j >= i} wire_j later at the soonest. The bucket of that byte, one of them, is
    updated before it leaves or when it has arrived. Then comes forward: all of it or, with
    "forward", the bucket's own layers and those behind, which are i's and those behind i's at
    least. So, for every i,

        T >= ready_i + sum_{j >= i} wire_j + min_{j >= i} update_j + forward_i.

    One iteration is enough to look at: forward awaits every message before backward makes new ones.
    No larger bound holds for "forward" if updates take no time, since a wire that drops a bucket
    for a newer one takes the largest of these: the newer a bucket, the sooner it is needed, and to
    send first what is needed soonest is best.

    With "none" and "backward" the training itself updates, so that T >= forward + backward +
    update; else a thread beside it may. With "iteration" a message leaves after its bucket's update
    and is awaited by the next one. The wire must carry all messages in T; a bucket's message and
    update must fit in T, and so must backward, a bucket's update and forward.

    >>> [least(1.0, 2.0, 0.0, [1.0, 1.0], overlap=o) for o in OVERLAPS]
    [5.0, 4.0, 4.0, 3.0]
    >>> iteration = 3.0, 3.0, 0.0, [3.0, 1.0, 1.0]
    >>> least(*iteration, "backward"), timeline(*iteration, overlap="forward").seconds
    (9.0, 8.0)
    >>> least(*iteration, "forward")
    7.0
    """
    _check(overlap)
    count = len(wire)
    share = np.full(count, 1 / count) if shares is None else np.asarray(shares) / sum(shares)
    occupied, updates = np.asarray(wire, dtype=float), update * share
    ready, behind = late + backward * np.cumsum(share), forward * np.cumsum(share)
    if overlap == "iteration":
        compute = np.max(ready + updates + behind)
        return float(max(compute, occupied.sum(), np.max(occupied + updates)))
    following = np.cumsum(occupied[::-1])[::-1]  # on the wire: bucket i and those after it
    following += np.minimum.accumulate(updates[::-1])[::-1]
    if overlap == "forward":
        return float(np.max(ready + following + behind))
    if overlap == "none":
        ready = np.full(count, late + backward)
    return float(forward + max(late + backward + update, np.max(ready + following)))


def _check(overlap: str) -> None:
    if overlap not in OVERLAPS:
        raise ValueError(f"unknown overlap {overlap!r}; choose from {', '.join(OVERLAPS)}")


def _newest_first(ready: np.ndarray, occupied: np.ndarray) -> np.ndarray:
    """When each bucket has left a wire that takes, of those that are ready, the newest."""
    left = np.zeros(len(ready))
    free, same = 0.0, 1e-12 * (ready[-1] + occupied.sum())  # times that only rounding parts
    waiting: list[int] = []  # buckets become ready in order, so the newest is the last
    following = 0
    while following < len(ready) or waiting:
        if not waiting:
            free = max(free, ready[following])
        while following < len(ready) and ready[following] <= free + same:
            waiting.append(following)
            following += 1
        i = waiting.pop()
        free = left[i] = free + occupied[i]
    return left


def _in_turn(ready: np.ndarray, takes: np.ndarray) -> np.ndarray:
    """end_i = max(end_{i-1}, ready_i) + takes_i: the ends of jobs done one after the other."""
    total = np.cumsum(takes)
    return total + np.maximum.accumulate(ready - (total - takes))


def _await(start: float, arrivals: np.ndarray, work: np.ndarray) -> tuple[float, float]:
    """The end of awaiting the buckets in this order and working on each, and the slack."""
    ends = _in_turn(np.maximum(arrivals, start), work)
    before = np.concatenate([[start], ends[:-1]])
    return float(ends[-1]), float(np.maximum(before - arrivals, 0).min())
