"""Memory that all processes of one machine have mapped: everyone's messages, and how far each is.

A process's memory holds its messages twice, for every other step, and counters that others read:
up to which step it has used the messages of others, and the step of the last message it has formed
for each bucket. Nobody but the owner writes. On x86-64 others see its writes in their order, so a
counter says that what was written before it is there.
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
from decentlam.membership.watch import troubled

SETS = 2  # of buffers
_LINE = 64  # bytes; buffers begin at a line of the cache
_COUNTER = 8  # bytes
_SLEEP_SECONDS = (2e-5, 1e-3)  # first and longest, between two looks at a counter
_ALIVE_SECONDS = 0.05  # between two looks at whether a process is still there


def on_one_machine(network: Network, able: bool) -> bool:
    """Whether all processes are able to and can map each other's memory; asked of all together.

    Other namespaces are as good as other machines: an emulated network must not be passed by.
    """
    found = network.gather(_machine() if able else None)
    return None not in found and all(each == found[0] for each in found)


def _machine() -> list[object] | None:
    """What processes that can share memory have alike; None where nobody can."""
    if not hasattr(os, "memfd_create") or platform.machine() != "x86_64":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:  # a sandbox; whoever raised here would leave the others waiting
        return None
    return [boot, os.getuid(), *spaces]


class SharedBuffers:
    """The memory of every process, for messages that look like `likes`, one per bucket."""

    def __init__(
        self, likes: Sequence[Tensor], memory: list[mmap.mmap], pids: list[int], rank: int
    ) -> None:
        self._rank, self._pids = rank, pids
        self._counters = [memoryview(m)[: _head_bytes(likes)].cast("q") for m in memory]
        self._buffers = [_cut(m, likes) for m in memory]

    def own(self, count: int, bucket: int) -> Tensor:
        return self.of(self._rank, count, bucket)

    def of(self, rank: int, count: int, bucket: int) -> Tensor:
        """Where a process forms the message of a bucket in its step `count`."""
        return self._buffers[rank][count % SETS][bucket]

    def set_formed(self, count: int, bucket: int) -> None:
        """The message of this process is there."""
        self._counters[self._rank][2 + bucket] = count

    def formed(self, rank: int, count: int, bucket: int) -> CounterReached:
        counters, place = self._counters[rank], 2 + bucket
        return CounterReached(lambda: counters[place] >= count, self._pids[rank])

    def set_used(self, count: int) -> None:
        """This process needs the messages of others no more."""
        self._counters[self._rank][1] = count

    def used(self, rank: int, count: int) -> CounterReached:
        counters = self._counters[rank]
        return CounterReached(lambda: counters[1] >= count, self._pids[rank])

    def nbytes(self) -> int:
        """Of this process's own messages."""
        return sum(buffer.nbytes for kept in self._buffers[self._rank] for buffer in kept)


@dataclass(frozen=True)
class CounterReached:
    """What another process will say; waited for as torch's work objects are."""

    reached: Callable[[], bool]
    pid: int

    def is_completed(self) -> bool:
        return self.reached()

    def wait(self, timeout: timedelta) -> bool:
        begun = looked = time.monotonic()
        sleep, longest = _SLEEP_SECONDS
        while not self.reached():
            now = time.monotonic()
            if now - begun > timeout.total_seconds():
                raise RuntimeError("timed out")
            if now - looked > _ALIVE_SECONDS:
                if _ended(self.pid) and not self.reached():
                    raise RuntimeError(f"process {self.pid} has ended")
                if troubled():
                    raise RuntimeError("another process is gone")
                looked = now
            time.sleep(sleep)
            sleep = min(1.5 * sleep, longest)
        return True


def map_buffers(network: Network, likes: Sequence[Tensor]) -> SharedBuffers | None:
    """Maps the memory of all processes, on all of them together; None if one of them cannot."""
    size = _head_bytes(likes) + SETS * sum(map(_room, likes))
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
    if not complete:
        return None
    return SharedBuffers(likes, memory, [pid for pid, *_ in places], network.rank)


def _reserve(size: int) -> tuple[int | None, tuple[int, int, int] | None]:
    """Memory without a name in any file system: gone with the last process that maps it."""
    nonce, descriptor = secrets.randbits(62), None
    try:
        descriptor = os.memfd_create("decentlam", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, size)  # else a lack of memory would be a SIGBUS later
        os.pwrite(descriptor, nonce.to_bytes(_COUNTER, "little"), 0)
    except OSError:
        return descriptor, None
    return descriptor, (os.getpid(), descriptor, nonce)


def _map(pid: int, descriptor: int, nonce: int, size: int) -> mmap.mmap:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    if int.from_bytes(mapped[:_COUNTER], "little") != nonce:
        raise ValueError(f"process {pid} is another one than was meant")
    return mapped


def _head_bytes(likes: Sequence[Tensor]) -> int:
    """Of the counters: a nonce, the step used, and one for each bucket."""
    return math.ceil(_COUNTER * (2 + len(likes)) / _LINE) * _LINE


def _room(like: Tensor) -> int:
    return math.ceil(like.nbytes / _LINE) * _LINE


def _cut(memory: mmap.mmap, likes: Sequence[Tensor]) -> list[list[Tensor]]:
    sets: list[list[Tensor]] = []
    start = _head_bytes(likes)
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
