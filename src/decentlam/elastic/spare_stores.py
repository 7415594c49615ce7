"""Spare stores: every member of an elastic run has one, for the day that the run's store is gone.

A store in use has the number of the latest generation. A spare has none until a member moves in, so
of all stores that can be reached the run is in the one with the highest number, or will be in the
first of them. Where one of its stores was, another run may have its own by now: generations have
the run's name, and a store without any is the run's only if it is a member's spare.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from decentlam.elastic.generation import Generation, read
from decentlam.network.store import REQUEST_SECONDS, StoreError, ask, within

PREFIX = "decentlam elastic"
_LOOK_SECONDS = 0.2  # between two looks for members that are about to move
_CONNECT_SECONDS = 2.0
_FIND_SECONDS = 5.0


def connect(address: str) -> tuple[Generation | None, dist.Store]:
    """The store there and its latest generation, if it has one; OSError: nobody listens."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()  # torch tries for long
    # Whose process is dying takes one more connection, and torch then tries for this long, too.
    store = dist.TCPStore(
        host, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
    )
    store.set_timeout(timedelta(seconds=REQUEST_SECONDS))
    inner = dist.PrefixStore(PREFIX, store)
    if not inner.check(["latest"]):
        return None, store
    return read(inner.get(f"generation/{int(inner.get('latest'))}")), store


def find(
    used: Iterable[str], spares: Sequence[str], run: str | None, seconds: float
) -> tuple[int, str, dist.Store] | None:
    """Return the store, of those that answer in so many seconds, that the run is in or will be in:
    its latest generation, -1 if there is none, its address, and the store. None: no store of the
    run answers. `run` is its name, where that is known."""
    deadline = time.monotonic() + seconds
    addresses = dict.fromkeys((*used, *spares))
    asked = {address: ask(partial(connect, address)) for address in addresses}
    best: tuple[int, str, dist.Store] | None = None
    for address, answer in asked.items():
        try:
            found, store = within(max(0.0, deadline - time.monotonic()), answer, address)
        except (StoreError, OSError, RuntimeError, ValueError, LookupError):
            continue
        if address not in spares if found is None else run not in (None, found.run):
            continue  # of another run
        latest = -1 if found is None else found.number
        if best is None or latest > best[0]:
            best = latest, address, store
    return best


def find_run(addresses: Sequence[str], seconds: float, run: str | None = None) -> dist.Store | None:
    """The store of a run that is under way; waits while its members are about to move. None: none
    of its members can be reached."""
    deadline = time.monotonic() + seconds
    while (found := find((), addresses, run, _FIND_SECONDS)) is not None:
        latest, _, store = found
        if latest >= 0:
            return store
        if time.monotonic() > deadline:
            raise StoreError(
                f"the members of the run at {', '.join(addresses)} have no store in use"
            )
        time.sleep(_LOOK_SECONDS)
    return None


def read_addresses(path: Path | None) -> tuple[list[str], str | None]:
    """Return the addresses in a file and the name of the run; none if there is no such file."""
    words = path.read_text().split() if path is not None and path.exists() else []
    names = [word for word in words if ":" not in word]
    return [word for word in words if ":" in word], names[0] if names else None


def write_addresses(path: Path, addresses: Iterable[str], run: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text("\n".join((*addresses, run)) + "\n")
    draft.replace(path)
