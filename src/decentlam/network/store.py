"""The rendezvous store: opening one at a given address, and requests to it that cannot hang.

A TCPStore whose process is stopped, or behind a link that is down, never answers, and its own
timeout does not help there. So one thread makes all requests, and whoever asks sets a limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from decentlam.errors import ExchangeError

T = TypeVar("T")
Request = tuple[Callable[[Any], Any], "Future[Any]"]


REQUEST_SECONDS = 60.0


class StoreError(ExchangeError):
    """The store does not answer."""


class StoreGoneError(StoreError):
    """The process of the store has ended, or closed the connection."""


def open_store(host: str, port: int = 0) -> dist.TCPStore:
    """Open a store that listens at this address only; port 0 picks a free port.

    Left to itself a TCPStore listens on all interfaces, and takes writes from anyone.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listening:
        return dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=REQUEST_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=os.dup(listening.fileno()),  # the store closes it
        )


def address_of(store: dist.Store) -> str | None:
    """Return "host:port" of a TCPStore, or None for any other kind of store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else None


def ask(work: Callable[[], T]) -> Future[T]:
    """Return what work() returns, in a thread that is left behind if it never does."""
    future: Future[T] = Future()
    threading.Thread(target=_answer, args=(work, future), daemon=True).start()
    return future


def within(seconds: float, answer: Future[T], who: str) -> T:
    """The answer, or an error after this many seconds."""
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():
            raise  # of the work itself
        raise StoreError(
            f"{who} did not answer within {seconds:g} s: its process is gone or stopped, or the "
            "link is down"
        ) from error


class StoreCalls:
    """A connection of its own to the store, used by a thread of its own."""

    def __init__(self, store: dist.Store) -> None:
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._unanswered: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(
            target=_serve, args=(store, self._requests), name="decentlam store", daemon=True
        )
        self._thread.start()

    def call(self, request: Callable[[Any], T], seconds: float) -> T:
        """Return what request(store) returns, or raise after this many seconds."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise _left()
            self._unanswered.add(future)
        self._requests.put((request, future))
        try:
            return within(seconds, future, "the rendezvous store")
        except ExchangeError:
            raise
        except RuntimeError as error:
            text = (str(error).splitlines() or [repr(error)])[0]
            raise StoreGoneError(f"the rendezvous store is gone: {text}") from error
        finally:
            with self._lock:
                self._unanswered.discard(future)

    def close(self) -> None:
        """Whoever waits for an answer gets an error now."""
        with self._lock:
            self._closed, waiting = True, list(self._unanswered)
        self._requests.put(None)
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # the answer has just come
                future.set_exception(_left())

    def join(self, seconds: float) -> None:
        """Wait for the thread after `close`: inside torch when Python ends, it would abort."""
        self._thread.join(seconds)


def _left() -> StoreError:
    return StoreError("the rendezvous store was left by this process")


def _serve(store: dist.Store, requests: SimpleQueue[Request | None]) -> None:
    own: dist.Store | None = None

    def answer(request: Callable[[Any], T]) -> T:
        nonlocal own
        own = own or store.clone()  # may fail like any request
        return request(own)

    while (item := requests.get()) is not None:
        request, future = item
        _answer(partial(answer, request), future)


def _answer(work: Callable[[], T], future: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            future.set_exception(error)
    else:
        with contextlib.suppress(InvalidStateError):
            future.set_result(result)
