"""Sends messages in pieces, a few at a time, those of the most urgent bucket first.

A connection delivers in the order of posting. When the wire is behind, the buckets of the first
layers, which backward completes last and the next forward needs first, would wait for all others.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import Empty, PriorityQueue

import torch.distributed as dist
from torch import Tensor

from decentlam.exchange.base import Pending, exchange_errors
from decentlam.exchange.neighbors import Tensors, Wire
from decentlam.exchange.network import Network

_AT_A_TIME = 2  # pieces on the wire: one is sent while the next one is posted
PIECE_BYTES = 1 << 19  # where no link was measured

Post = Callable[[], list[dist.Work]]


class PriorityWire(Wire):
    """gloo, with later buckets overtaking earlier ones. All nodes have the same `piece_bytes`: one
    tag delivers pieces in their order. An urgent message has to wait for a piece or two of another,
    not for the whole of it; but every piece costs the CPU some calls."""

    def __init__(
        self, network: Network, tag: int, timeout: timedelta, piece_bytes: int = PIECE_BYTES
    ) -> None:
        assert network.group is not None
        self._network, self._group, self._tag = network, network.group, tag
        self._sender = PrioritySender(timeout)
        self._piece_bytes = piece_bytes

    def receive(self, bucket: int, buffers: Tensors, pending: Pending) -> None:
        for j, buffer in buffers.items():
            with exchange_errors(pending.where, f"node {j}", pending.timeout):
                rank = self._network.rank_of(j)
                tag = self._tag + bucket
                works = [self._group.recv([piece], rank, tag) for piece in self._cut(buffer)]
            pending.receives += [(f"node {j}", work) for work in works]

    def send(self, bucket: int, tensors: Tensors, pending: Pending) -> None:
        ranks = [self._network.rank_of(j) for j in tensors]
        cuts = itertools.zip_longest(*map(self._cut, tensors.values()))
        posts = [
            functools.partial(_post, self._group, ranks, pieces, self._tag + bucket)
            for pieces in cuts
        ]
        if posts:
            whom = " or ".join(f"node {j}" for j in tensors)
            pending.sends = [(whom, self._sender.submit(bucket, posts))]

    def _cut(self, message: Tensor) -> Sequence[Tensor]:
        """The pieces that a message is sent in."""
        return message.view(-1).split(self._piece_bytes // message.element_size())


def _post(
    group: dist.ProcessGroup, ranks: list[int], pieces: tuple[Tensor | None, ...], tag: int
) -> list[dist.Work]:
    """Sends everybody the next piece; None to whom has all. (A method would keep its wire alive for
    as long as the sender remembers.)"""
    to_all = zip(ranks, pieces, strict=True)
    return [group.send([piece], rank, tag) for rank, piece in to_all if piece is not None]


class QueuedMessage:
    """A message that the sender has taken; waited for as torch's own work objects are."""

    def __init__(self, pieces: int) -> None:
        self._left = pieces  # that have not been sent yet
        self._over: Future[None] = Future()

    def wait(self, timeout: timedelta) -> bool:
        try:
            self._over.result(timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError("the message could not be sent in time") from None
        return True

    def is_completed(self) -> bool:
        return self._over.done()

    def piece_sent(self) -> None:
        self._left -= 1
        if self._left == 0 and not self._over.done():
            self._over.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(RuntimeError(str(error)))  # without what its traceback holds


Piece = tuple[QueuedMessage, Post]
Entry = tuple[float, int, Piece | None]  # lowest first: minus priority, order of submission
Queue = PriorityQueue[Entry]

_CLOSE: Entry = (math.inf, 0, None)  # after everything else


class PrioritySender:
    """One thread that posts what it was given and waits until it has left."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._queue: Queue = PriorityQueue()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def submit(self, priority: int, pieces: Sequence[Post]) -> QueuedMessage:
        """Takes a message, in a piece at least; of those waiting, the one with the highest priority
        goes first."""
        if not pieces:
            raise ValueError("there is no piece of the message to send")
        message = QueuedMessage(len(pieces))
        for post in pieces:
            self._queue.put((-priority, next(self._order), (message, post)))
        if self._thread is None:
            arguments = (self._queue, self._timeout)
            self._thread = threading.Thread(
                target=_work, args=arguments, name="decentlam sender", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, _CLOSE)
        return message


def _work(queue: Queue, timeout: timedelta) -> None:
    on_the_wire: deque[tuple[QueuedMessage, list[dist.Work]]] = deque()
    while True:
        posted = _post_next(queue, on_the_wire)
        if posted and len(on_the_wire) < _AT_A_TIME:
            continue
        if not on_the_wire:
            return
        _await_first(on_the_wire, timeout)


# Functions of their own, so that their names keep no message alive while the thread waits.


def _post_next(queue: Queue, on_the_wire: deque[tuple[QueuedMessage, list[dist.Work]]]) -> bool:
    """Posts the most urgent piece; False if there is none, or the queue was closed."""
    try:
        _, _, piece = queue.get(block=not on_the_wire)
    except Empty:
        return False
    if piece is None:
        queue.put(_CLOSE)  # for the next call
        return False
    message, post = piece
    if not message.is_completed():  # it has not failed
        try:
            on_the_wire.append((message, post()))
        except Exception as error:  # whatever it is, nobody may wait for this message
            message.fail(error)
    return True


def _await_first(
    on_the_wire: deque[tuple[QueuedMessage, list[dist.Work]]], timeout: timedelta
) -> None:
    message, works = on_the_wire.popleft()
    try:
        for work in works:
            work.wait(timeout)
    except Exception as error:
        message.fail(error)
    else:
        message.piece_sent()
