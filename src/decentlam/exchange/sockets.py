"""Keeps what waits inside the kernel short, so that an urgent message can still overtake.

A TCP connection takes megabytes before the first of them is on the wire. What it has taken leaves
in order: at 100 Mbit/s, a message that forward waits for would stand behind a third of a second.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial

from decentlam.exchange.network import Network

_NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_DESCRIPTORS = "/proc/self/fd"

Ends = tuple[object, object]  # addresses: here, there


def keep_short(network: Network, size: int) -> Callable[[], None]:
    """Lets connections between these processes take at most `size` bytes ahead of the wire; called
    on all of them together. Connections to anybody else are left alone. What it returns undoes
    it."""
    everyone = network.gather({_ends(connection) for connection in _connections()})
    del everyone[network.rank]  # a process that talks to itself is nobody's business
    inside = {(there, here) for ends in everyone for here, there in ends}
    _limit(inside, size)
    return partial(_limit, inside, 0)  # the system's own limit


def _limit(inside: set[Ends], size: int) -> None:
    for connection in _connections():
        if _NOT_SENT is not None and _ends(connection) in inside:
            with contextlib.suppress(OSError):  # a sandbox without it
                connection.setsockopt(socket.IPPROTO_TCP, _NOT_SENT, size)


def _ends(connection: socket.socket) -> Ends:
    return connection.getsockname()[:2], connection.getpeername()[:2]


def _connections() -> Iterator[socket.socket]:
    """The TCP connections of this process, each closed again before the next is shown: who held on
    to one would keep it open when its owner closes it."""
    descriptors = []
    with contextlib.suppress(OSError):  # not Linux
        descriptors = os.listdir(_DESCRIPTORS)
    for descriptor in descriptors:
        try:
            if not os.readlink(f"{_DESCRIPTORS}/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # fails if it listens or is gone
                    if connection.type == socket.SOCK_STREAM:
                        yield connection
        except OSError:  # closed since, or no connection
            continue
