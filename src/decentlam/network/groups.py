"""torch's process groups as a heartbeat needs them: waits that end when somebody is lost."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from decentlam.network.store import StoreCalls, StoreError

T = TypeVar("T")

_FORMED = timedelta(seconds=60.0)  # for a group to form, if torch says nothing else
_REQUEST_SECONDS = 5.0  # of one request, at least
_CONNECT_SECONDS = 2.0  # in which those who are there have connected to each other
_LOOK_SECONDS = 0.02  # between two looks whether others have written something
_TAG = (1 << 13) - 1  # of a message that nobody sends

_forsaken: weakref.ref[dist.ProcessGroup] | None = None  # one that is not to be destroyed


class Watch(Protocol):
    """The part of a heartbeat that a group store needs."""

    calls: StoreCalls
    limit: float
    members: list[int]

    @property
    def lost(self) -> dict[int, str]: ...

    def name(self, member: int) -> str: ...


class GroupStore(dist.Store):
    """The store of a heartbeat for torch to form a group in, whose waits end when somebody is lost.

    In another store torch waits until its timeout for an address that nobody writes any more.
    Errors are those of torch: whoever forms a group looks for their cause.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._read: dict[str, bytes] = {}  # by a wait: torch asks for the value next
        self._lost_at = math.inf

    def _call(self, request: Callable[[Any], T]) -> T:
        try:
            return self._watch.calls.call(request, max(self._watch.limit, _REQUEST_SECONDS))
        except StoreError as error:
            raise RuntimeError(str(error)) from error

    def _check_nobody_is_lost(self) -> None:
        """Raise, but not at once: whoever connects to this process meanwhile would wait for long in
        gloo, and should come to its own wait for who is lost."""
        watch, now = self._watch, time.monotonic()
        lost = [m for m in watch.members if m in watch.lost]
        self._lost_at = min(self._lost_at, now) if lost else math.inf
        if now - self._lost_at > min(_CONNECT_SECONDS, watch.limit / 2):
            raise RuntimeError(f"{', '.join(map(watch.name, lost))} died or stopped")

    def wait(self, keys: list[str], timeout: timedelta = _FORMED) -> None:
        def read(store: Any) -> list[bytes] | None:
            return store.multi_get(keys) if store.check(keys) else None

        deadline = time.monotonic() + timeout.total_seconds()
        while (values := self._call(read)) is None:
            self._check_nobody_is_lost()
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody wrote {keys} within {timeout.total_seconds():g} s")
            time.sleep(_LOOK_SECONDS)
        self._read = dict(zip(keys, values, strict=True))

    def get(self, key: str) -> bytes:
        if key not in self._read:
            self.wait([key])
        return self._read.pop(key)

    def set(self, key: str, value: str) -> None:
        self._call(lambda store: store.set(key, value))

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda store: store.check(keys))

    def add(self, key: str, amount: int) -> int:
        self._check_nobody_is_lost()  # torch takes the error of a wait for a timeout, and asks here
        return self._call(lambda store: store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(lambda store: store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return self._call(lambda store: store.delete_key(key))


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of a gloo group that was formed with another one."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


def close_connections(group: dist.ProcessGroup) -> None:
    """End everything that waits in a gloo group. A wait that times out closes all connections of
    this process in the group, so one is made to time out."""
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], rank, _TAG).wait(timedelta(milliseconds=1))


def destroy_default_group(alone: bool = False) -> None:
    """Leave torch's default group, if there is one.

    `alone`: the others may be waiting for this process, and not leave with it. gloo only closes
    its connections, but NCCL waits until all leave, so such a group is left to the system.
    """
    global _forsaken
    if not dist.is_initialized():
        return
    world = dist.group.WORLD
    assert world is not None
    backends = dist.get_backend_config(world)
    if alone and "nccl" in backends:
        _forsaken = weakref.ref(world)
        if "gloo" in backends:
            close_connections(world)
    if _forsaken is None or _forsaken() is not world:
        dist.destroy_process_group()
