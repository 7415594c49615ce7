"""Sends a few messages at a time, the most urgent first.

A connection delivers in the order of posting. When the wire is behind, the buckets of the first
layers, which backward completes last and the next forward needs first, would wait for all others.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

Post = Callable[[], list[dist.Work]]

_AT_A_TIME = 2  # messages on the wire: one is sent while the next one is posted


class Parcel:
    """A message in the courier's hands; waited for as torch's own work objects are."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self._error: BaseException | None = None
        self._over = threading.Event()

    def wait(self, timeout: timedelta) -> bool:
        if not self._over.wait(timeout.total_seconds()):
            raise RuntimeError("the message could not be sent in time")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def end(self, error: BaseException | None = None) -> None:
        self._error, self.post = error, list
        self._over.set()


class Courier:
    """One thread that posts what it was handed and waits until it has left."""

    def __init__(self, timeout: timedelta) -> None:
        self._state = _State(timeout)
        self._thread: threading.Thread | None = None

    def hand(self, urgency: int, post: Post) -> Parcel:
        """Takes a message; of those waiting, the one with the highest urgency goes first."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._state,), name="decentlam courier", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._state.close)
        return self._state.add(urgency, post)


class _State:
    """What the thread shares with its owner, so that it does not keep the owner alive."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Parcel]] = []
        self._order = itertools.count()
        self._closed = False

    def add(self, urgency: int, post: Post) -> Parcel:
        parcel = Parcel(post)
        with self._changed:
            heapq.heappush(self._waiting, (-urgency, next(self._order), parcel))
            self._changed.notify()
        return parcel

    def take(self, block: bool) -> Parcel | None:
        """The most urgent message; None if there is none, or for ever when closed and empty."""
        with self._changed:
            while block and not self._waiting and not self._closed:
                self._changed.wait()
            return heapq.heappop(self._waiting)[2] if self._waiting else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def _work(state: _State) -> None:
    on_the_wire: deque[tuple[Parcel, list[dist.Work]]] = deque()
    while True:
        parcel = state.take(block=not on_the_wire)
        if parcel is None and not on_the_wire:
            return
        if parcel is not None:
            try:
                on_the_wire.append((parcel, parcel.post()))
            except Exception as error:  # whatever it is, nobody may wait for this parcel
                parcel.end(RuntimeError(str(error)))
        if on_the_wire and (parcel is None or len(on_the_wire) >= _AT_A_TIME):
            _await(*on_the_wire.popleft(), state.timeout)


def _await(parcel: Parcel, works: list[dist.Work], timeout: timedelta) -> None:
    try:
        for work in works:
            work.wait(timeout)
    except Exception as error:
        parcel.end(RuntimeError(str(error)))
    else:
        parcel.end()
