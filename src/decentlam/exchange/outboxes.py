"""Memory that all processes of one machine have mapped: everyone's messages, and how far each is.

A process's memory holds its messages twice, for every other turn, and numbers that others read:
up to which turn it has used the messages of others, and the turn of the last message it has formed
for each bucket. Nobody but the owner writes. On x86-64 others see its writes in their order, so a
number says that what was written before it is there.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from decentlam.exchange.network import Network

SETS = 2  # of buffers
_LINE = 64  # bytes; buffers begin at a line of the cache
_NUMBER = 8  # bytes
_NAPS = (2e-5, 1e-3)  # seconds, first and longest, between two looks at a number
_LIFE_SECONDS = 0.05  # between two looks at whether a process is still there


def one_machine(network: Network, able: bool) -> bool:
    """Whether all processes are able to and can map each other's memory; asked of all together.

    Other namespaces are as good as other machines: an emulated network must not be passed by.
    """
    found = network.gather(_here() if able else None)
    return None not in found and len(set(found)) == 1


def _here() -> tuple[object, ...] | None:
    """What processes that can share memory have alike; None where nobody can."""
    if not hasattr(os, "memfd_create") or platform.machine() != "x86_64":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:  # a sandbox; whoever raised here would leave the others waiting
        return None
    return (boot, os.getuid(), *spaces)


class Outboxes:
    """The memory of every process, for messages that look like `likes`, one per bucket."""

    def __init__(
        self, likes: Sequence[Tensor], memory: list[mmap.mmap], pids: list[int], me: int
    ) -> None:
        self.me, self._pids = me, pids
        self._numbers = [memoryview(m)[: _head(likes)].cast("q") for m in memory]
        self._buffers = [_cut(m, likes) for m in memory]

    def buffer(self, process: int, turn: int, slot: int) -> Tensor:
        return self._buffers[process][turn % SETS][slot]

    def announce(self, turn: int, slot: int) -> None:
        """The message of this process is there."""
        self._numbers[self.me][2 + slot] = turn

    def announced(self, process: int, turn: int, slot: int) -> News:
        numbers, place = self._numbers[process], 2 + slot
        return News(lambda: numbers[place] >= turn, self._pids[process])

    def set_done(self, turn: int) -> None:
        """This process needs the messages of others no more."""
        self._numbers[self.me][1] = turn

    def done(self, process: int, turn: int) -> News:
        numbers = self._numbers[process]
        return News(lambda: numbers[1] >= turn, self._pids[process])

    def nbytes(self) -> int:
        """Of this process's own messages."""
        return sum(buffer.nbytes for boxes in self._buffers[self.me] for buffer in boxes)


@dataclass(frozen=True)
class News:
    """What another process will say; waited for as torch's work objects are."""

    arrived: Callable[[], bool]
    pid: int

    def is_completed(self) -> bool:
        return self.arrived()

    def wait(self, timeout: timedelta) -> bool:
        begun = looked = time.monotonic()
        nap, longest = _NAPS
        while not self.arrived():
            now = time.monotonic()
            if now - begun > timeout.total_seconds():
                raise RuntimeError("timed out")
            if now - looked > _LIFE_SECONDS:
                if _ended(self.pid) and not self.arrived():
                    raise RuntimeError(f"process {self.pid} has ended")
                looked = now
            time.sleep(nap)
            nap = min(1.5 * nap, longest)
        return True


def open_outboxes(network: Network, likes: Sequence[Tensor]) -> Outboxes | None:
    """Maps the memory of all processes, on all of them together; None if one of them cannot."""
    size = _head(likes) + SETS * sum(map(_room, likes))
    memory: list[mmap.mmap] = []
    descriptor, place = _reserve(size)
    places = network.gather(place)
    try:
        if None not in places:
            memory = [_map(pid, fd, nonce, size) for pid, fd, nonce in places]
    except (OSError, ValueError):
        memory = []
    complete = all(network.gather(bool(memory)))  # now nobody opens it any more
    if descriptor is not None:
        os.close(descriptor)
    return Outboxes(likes, memory, [pid for pid, *_ in places], network.rank) if complete else None


def _reserve(size: int) -> tuple[int | None, tuple[int, int, int] | None]:
    """Memory without a name in any file system: gone with the last process that maps it."""
    nonce, descriptor = secrets.randbits(62), None
    try:
        descriptor = os.memfd_create("decentlam", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, size)  # else a lack of memory would be a SIGBUS later
        os.pwrite(descriptor, nonce.to_bytes(_NUMBER, "little"), 0)
    except OSError:
        return descriptor, None
    return descriptor, (os.getpid(), descriptor, nonce)


def _map(pid: int, descriptor: int, nonce: int, size: int) -> mmap.mmap:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    if int.from_bytes(mapped[:_NUMBER], "little") != nonce:
        raise ValueError(f"process {pid} is another one than was meant")
    return mapped


def _head(likes: Sequence[Tensor]) -> int:
    """Bytes of the numbers: a nonce, the turn done, and one for each bucket."""
    return math.ceil(_NUMBER * (2 + len(likes)) / _LINE) * _LINE


def _room(like: Tensor) -> int:
    return math.ceil(like.nbytes / _LINE) * _LINE


def _cut(memory: mmap.mmap, likes: Sequence[Tensor]) -> list[list[Tensor]]:
    sets: list[list[Tensor]] = []
    start = _head(likes)
    for _ in range(SETS):
        sets.append([])
        for like in likes:
            flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=start)
            sets[-1].append(flat.view(like.shape))
            start += _room(like)
    return sets


def _ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"
