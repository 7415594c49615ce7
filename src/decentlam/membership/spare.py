"""Spare stores: every member of an elastic run has one, for the day that the run's store is gone.

A store in use has the number of the latest generation. A spare has none until a member moves in, so
of all stores that can be reached the run is in the one with the highest number, or will be in the
first of them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from decentlam.membership.store import StoreError, ask, within

PREFIX = "decentlam elastic"
_LOOK_SECONDS = 0.2  # between two looks for members that are about to move
_CONNECT_SECONDS = 2.0
_FIND_SECONDS = 5.0
_REQUEST_SECONDS = 60.0


def open_store(host: str, port: int = 0) -> dist.TCPStore:
    """A store that listens at this address only; port 0 is a free one.

    Left to itself a TCPStore listens on all interfaces, and takes writes from anyone.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listening:
        return dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=_REQUEST_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=os.dup(listening.fileno()),  # the store closes it
        )


def address_of(store: dist.Store) -> str | None:
    """Host and port of a TCPStore; None: it is another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else None


def connect(address: str) -> tuple[int, dist.Store]:
    """The store there and its latest generation, -1 if it has none; OSError: nobody listens."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()  # torch tries for long
    # Whose process is dying takes one more connection, and torch then tries for this long, too.
    store = dist.TCPStore(
        host, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
    )
    store.set_timeout(timedelta(seconds=_REQUEST_SECONDS))
    inner = dist.PrefixStore(PREFIX, store)
    return int(inner.get("latest")) if inner.check(["latest"]) else -1, store


def find(addresses: Iterable[str], seconds: float) -> tuple[int, str, dist.Store] | None:
    """Of the stores that answer within so many seconds the one that the run is in, or will be in:
    its latest generation, address and the store. None: no store answers."""
    deadline = time.monotonic() + seconds
    asked = {address: ask(partial(connect, address)) for address in dict.fromkeys(addresses)}
    best: tuple[int, str, dist.Store] | None = None
    for address, answer in asked.items():
        try:
            latest, store = within(max(0.0, deadline - time.monotonic()), answer, address)
        except (StoreError, OSError, RuntimeError, ValueError):
            continue
        if best is None or latest > best[0]:
            best = latest, address, store
    return best


def find_run(addresses: Iterable[str], seconds: float) -> dist.Store | None:
    """The store of a run that is under way; waits while its members are about to move. None: none
    of its members can be reached."""
    known, deadline = list(addresses), time.monotonic() + seconds
    while (found := find(known, _FIND_SECONDS)) is not None:
        latest, _, store = found
        if latest >= 0:
            return store
        if time.monotonic() > deadline:
            raise StoreError(f"the members of the run at {', '.join(known)} have no store in use")
        time.sleep(_LOOK_SECONDS)
    return None


def read_addresses(named: str) -> list[str]:
    """What the user gave: addresses with commas between them, or a file that has them."""
    if "/" not in named:
        return [word.strip() for word in named.split(",") if word.strip()]
    path = Path(named)
    return path.read_text().split() if path.exists() else []


def write_addresses(path: Path, addresses: Iterable[str]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text("\n".join(addresses) + "\n")
    draft.replace(path)
