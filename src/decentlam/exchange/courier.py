"""Sends a few pieces of messages at a time, those of the most urgent message first.

A connection delivers in the order of posting. When the wire is behind, the buckets of the first
layers, which backward completes last and the next forward needs first, would wait for all others.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

Post = Callable[[], list[dist.Work]]

_AT_A_TIME = 2  # pieces on the wire: one is sent while the next one is posted


class Parcel:
    """A message in the courier's hands; waited for as torch's own work objects are."""

    def __init__(self, pieces: Sequence[Post]) -> None:
        self.pieces = deque(pieces)  # that are still to be posted
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
        if not self._over.is_set():
            self._error = error
            self.pieces.clear()
            self._over.set()


class Courier:
    """One thread that posts what it was handed and waits until it has left."""

    def __init__(self, timeout: timedelta) -> None:
        self._state = _State(timeout)
        self._thread: threading.Thread | None = None

    def hand(self, urgency: int, pieces: Sequence[Post]) -> Parcel:
        """Takes a message, in a piece at least; of those waiting, the one with the highest urgency
        goes first."""
        if not pieces:
            raise ValueError("there is no piece of the message to send")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._state,), name="decentlam courier", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._state.close)
        return self._state.add(urgency, Parcel(pieces))


class _State:
    """What the thread shares with its owner, so that it does not keep the owner alive."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Parcel]] = []  # each has pieces left
        self._order = itertools.count()
        self._closed = False

    def add(self, urgency: int, parcel: Parcel) -> Parcel:
        with self._changed:
            heapq.heappush(self._waiting, (-urgency, next(self._order), parcel))
            self._changed.notify()
        return parcel

    def take(self, block: bool) -> tuple[Parcel, Post] | None:
        """The most urgent piece; None if there is none, or for ever when closed and empty."""
        with self._changed:
            while block and not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            parcel = self._waiting[0][2]
            post = parcel.pieces.popleft()
            if not parcel.pieces:
                heapq.heappop(self._waiting)
            return parcel, post

    def drop(self, parcel: Parcel) -> None:
        """What is left of a message that failed is not sent."""
        with self._changed:
            self._waiting = [entry for entry in self._waiting if entry[2] is not parcel]
            heapq.heapify(self._waiting)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def _work(state: _State) -> None:
    on_the_wire: deque[tuple[Parcel, list[dist.Work], bool]] = deque()
    while True:
        taken = parcel = post = works = work = None  # they keep messages alive while it waits
        taken = state.take(block=not on_the_wire)
        if taken is None and not on_the_wire:
            return
        if taken is not None:
            parcel, post = taken
            last = not parcel.pieces
            try:
                on_the_wire.append((parcel, post(), last))
            except Exception as error:  # whatever it is, nobody may wait for this parcel
                _fail(state, parcel, error)
        if on_the_wire and (taken is None or len(on_the_wire) >= _AT_A_TIME):
            parcel, works, last = on_the_wire.popleft()
            try:
                for work in works:
                    work.wait(state.timeout)
            except Exception as error:
                _fail(state, parcel, error)
            else:
                if last:
                    parcel.end()


def _fail(state: _State, parcel: Parcel, error: Exception) -> None:
    state.drop(parcel)
    parcel.end(RuntimeError(str(error)))
