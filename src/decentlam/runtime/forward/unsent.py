"""Connections that take little from a program ahead of the wire.

A connection takes up to 4 MB, and an urgent message waits for what is in there: 32 ms at 1 Gbit/s.
The order of sending would be in vain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket

UNSENT_BYTES = 1 << 18  # less of it wakes the sender more often, which costs the processor


def limit_unsent(limit_bytes: int = UNSENT_BYTES) -> int:
    """Limits what the TCP connections of this process take ahead of the wire; how many were set.

    gloo does not tell which are its own. For others it means less memory and no less speed. What
    the system does not know, or refuses, is left as it is.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None or not os.path.isdir("/proc/self/fd"):
        return 0
    value, changed = ctypes.c_int(limit_bytes), 0
    # Not by socket objects, which would set the default timeout of the script, if there is one.
    system = ctypes.CDLL(None)
    names: list[str] = []
    with contextlib.suppress(OSError):  # no more files may be open
        names = os.listdir("/proc/self/fd")
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            given = (ctypes.byref(value), ctypes.sizeof(value))
            changed += not system.setsockopt(int(name), socket.IPPROTO_TCP, option, *given)
    return changed
