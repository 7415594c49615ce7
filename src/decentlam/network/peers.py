"""What this process can see of another one: its heartbeat and, on the same machine, its end."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from decentlam.network.beats import Beat

_BUSY_LIMITS = 6  # limits for which a process may be silent that can be seen to run


@dataclass
class Peer:
    """Another process, as far as it is known."""

    beat: Beat
    since: float  # when its heartbeat last changed
    pidfd: int | None = None  # on this machine: can be polled for its end
    ended: bool = False

    @property
    def stopped(self) -> bool:
        """True if it is frozen, on this machine."""
        return self.pidfd is not None and is_stopped(self.beat["pid"])

    def end(self) -> None:
        """Note that it has ended, or is not watched any more."""
        self.ended = True
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def how_lost(self, mine: Beat, limit: float, now: float) -> str | None:
        """Return how it was seen that it is gone; None if it is there."""
        if self.beat["left"]:
            return "its script has ended"
        if self.ended:
            return "it has ended"
        near = self.pidfd is not None and self.beat["net"] == mine["net"]
        busy = near and not self.stopped  # it may hold Python's lock
        if now - self.since > limit * (_BUSY_LIMITS if busy else 1):
            return f"no heartbeat for {now - self.since:.1f} s"
        return None


def meet(beat: Beat, mine: Beat, now: float) -> Peer:
    """Return a process that was heard for the first time."""
    if beat["machine"] is None or beat["machine"] != mine["machine"]:
        return Peer(beat, now)
    try:
        return Peer(beat, now, os.pidfd_open(beat["pid"]))
    except ProcessLookupError:
        return Peer(beat, now, ended=True)
    except (OSError, AttributeError):  # a system, or a build of Python, without it
        return Peer(beat, now)


def own_facts() -> Beat:
    """Return what a heartbeat of this process says of where it runs. Processes with the same
    "machine" can see each other's end; between those with the same "net" there is no link."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": _namespace("pid"),
        "net": _namespace("net"),
    }


def _namespace(kind: str) -> list[str] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink(f"/proc/self/ns/{kind}")]
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """Return True if a process of this machine is frozen."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
