"""The TCP connections between the processes of a run, and the size of their send buffers.

Linux lets a connection buffer up to 4 MB that are not sent or not acknowledged yet. On a slow link
that is too much, in two ways. An urgent message waits for all that is in the buffer, 320 ms at 100
Mbit/s. And nodes that average with each other send both ways at once, where what has arrived is
acknowledged behind all that waits to be sent. The way whose window is smaller then has only a part
of the link, and nodes fall out of step. Small buffers keep both ways fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from decentlam.exchange.network import Network

UNSENT_BYTES = 1 << 18  # less of it wakes the sender more often, which costs the processor
USUAL_BYTES = 1 << 22  # that Linux lets a connection take
_ESTABLISHED = "01"
_SO_BUF_LOCK = 72  # of Linux; Python has no name for it


def between_processes(network: Network) -> list[int]:
    """This process's connections to those of the network on other machines, as file descriptors;
    asked of all together. gloo does not tell which are its own: those of which two processes of the
    network have one end each, and only if their addresses differ."""
    mine = of_this_process()
    ends = {tuple(end) for theirs in network.gather(list(mine)) for end in theirs}
    return [
        file
        for (here, there), file in mine.items()
        if (there, here) in ends and here.split(":")[0] != there.split(":")[0]
    ]


def of_this_process() -> dict[tuple[str, str], int]:
    """The file descriptors of its TCP connections, by both addresses; none where the system does
    not tell."""
    found: dict[tuple[str, str], int] = {}
    with contextlib.suppress(OSError):
        files = {_socket_of(name): int(name) for name in os.listdir("/proc/self/fd")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, here, there, state, *rest = line.split()
                if state == _ESTABLISHED and rest[5] in files:
                    found[here, there] = files[rest[5]]
    return found


def limit_ahead(connections: Iterable[int], ahead_bytes: int) -> int:
    """Limits what connections take ahead of what has arrived; how many were set.

    They are left as they are where that is no less than usual, or more than the system lets a
    program ask for: it would give less.
    """
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())
        asked = ahead_bytes // 2  # Linux doubles it, to have room for its own notes
        if ahead_bytes < USUAL_BYTES and asked <= most:
            return _set(connections, socket.SOL_SOCKET, socket.SO_SNDBUF, asked)
    return 0


def limit_unsent(connections: Iterable[int], unsent_bytes: int = UNSENT_BYTES) -> int:
    """Limits what connections take ahead of what has been sent; how many were set."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    return 0 if option is None else _set(connections, socket.IPPROTO_TCP, option, unsent_bytes)


def restore(connections: Iterable[int]) -> None:
    """Lets the system choose again what connections take."""
    connections = list(connections)
    _set(connections, socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
    limit_unsent(connections, 0)


def _socket_of(file: str) -> str:
    """The number of a socket; of any other file something else."""
    try:
        return os.readlink(f"/proc/self/fd/{file}").removeprefix("socket:[").removesuffix("]")
    except OSError:  # closed meanwhile
        return ""


def _set(connections: Iterable[int], level: int, option: int, value: int) -> int:
    # Not by socket objects, which would set the default timeout of the script, if there is one.
    system, number = ctypes.CDLL(None), ctypes.c_int(value)
    given = (ctypes.byref(number), ctypes.sizeof(number))
    return sum(not system.setsockopt(file, level, option, *given) for file in connections)
