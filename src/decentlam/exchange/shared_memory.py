"""Mixing between processes of one machine: neighbors read each other's messages where they are.

Nothing is sent and nothing received. Every process maps a stretch of memory that holds its messages
twice, for every other step, and counters that others read: up to which step it has used the
messages of others, and the step of the last message it has formed for each bucket. Nobody but the
owner writes. On x86-64 others see its writes in their order, so a counter says that what was
written before it is there. Before a buffer is written again, those who read it two steps ago must
be done.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from decentlam.exchange.base import Exchange, Pending
from decentlam.network.heartbeat import interrupted
from decentlam.network.network import Network
from decentlam.topology import Topology

SETS = 2  # of buffers
_LINE = 64  # bytes; buffers begin at a line of the cache
_COUNTER = 8  # bytes
_USED, _FORMED = 1, 2  # which counter: the step used; the step formed of the first bucket
_SLEEP_SECONDS = (2e-5, 1e-3)  # first and longest, between two looks at a counter
_ALIVE_SECONDS = 0.05  # between two looks at whether a process is still there


class SharedMemory(Exchange):
    """Reads the messages of all neighbors in place. `memory` is that of every process by rank."""

    def __init__(
        self,
        network: Network,
        topology: Topology,
        likes: Sequence[Tensor],
        timeout: timedelta,
        memory: Sequence[mmap.mmap],
        pids: Sequence[int],
    ) -> None:
        self._network, self._topology, self._timeout = network, topology, timeout
        self._node, self._ranks = network.node, list(map(network.rank_of, range(network.num_nodes)))
        self._pids = pids
        self._counters = [memoryview(m)[: _head_bytes(likes)].cast("q") for m in memory]
        self._buffers = [_cut(m, likes) for m in memory]  # by rank, set and bucket
        self._count = 0  # steps begun with these buffers; a step's number may go back
        self._row: dict[int, float] = {}  # the weights of this step
        self._readers: list[list[int]] = [[] for _ in range(SETS)]  # nodes, by set of buffers

    def begin(self, step: int, sizes: Sequence[int]) -> None:
        self._count += 1
        readers = self._readers[self._count % SETS]
        used = [self._reached(node, _USED, self._count - SETS) for node in readers]
        Pending(self._network, step, 0, self._timeout, works=used).wait()
        self._row = self._topology.row(self._node, step)
        self._readers[self._count % SETS] = self._topology.listeners(self._node, step)

    def message(self, bucket: int, size: int) -> Tensor:
        return self._buffers[self._network.rank][self._count % SETS][bucket][:size]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        count = self._count
        pending = Pending(self._network, step, bucket, self._timeout)
        pending.terms.append((self._row.get(self._node, 0.0), message))
        for j, weight in self._row.items():
            if j != self._node:
                theirs = self._buffers[self._ranks[j]][count % SETS][bucket]
                pending.terms.append((weight, theirs[: len(message)]))
                pending.works.append(self._reached(j, _FORMED + bucket, count))
        self._counters[self._network.rank][_FORMED + bucket] = count
        # As if the message had been sent.
        pending.bytes_sent = message.nbytes * len(self._readers[count % SETS])
        return pending

    def end(self) -> None:
        self._counters[self._network.rank][_USED] = self._count

    def _reached(self, node: int, counter: int, count: int) -> tuple[str, _CounterReached]:
        rank = self._ranks[node]
        work = _CounterReached(self._counters[rank], counter, count, self._pids[rank])
        return f"node {node}", work


@dataclass(frozen=True)
class _CounterReached:
    """A counter of another process; it can be waited for like torch's work objects."""

    counters: memoryview
    counter: int
    count: int
    pid: int

    def is_completed(self) -> bool:
        return bool(self.counters[self.counter] >= self.count)

    def wait(self, timeout: timedelta) -> bool:
        begun = looked = time.monotonic()
        sleep, longest = _SLEEP_SECONDS
        while not self.is_completed():
            now = time.monotonic()
            if now - begun > timeout.total_seconds():
                raise RuntimeError("timed out")
            if now - looked > _ALIVE_SECONDS:
                if _ended(self.pid) and not self.is_completed():
                    raise RuntimeError(f"process {self.pid} has ended")
                if interrupted():
                    raise RuntimeError("another process is gone")
                looked = now
            time.sleep(sleep)
            sleep = min(1.5 * sleep, longest)
        return True


def share_memory(
    network: Network, topology: Topology, likes: Sequence[Tensor], timeout: timedelta
) -> SharedMemory | None:
    """Return an exchange for messages that look like `likes`, one per bucket, or None if the
    processes cannot read each other's memory. All of them call it together."""
    here = _machine() if likes and likes[0].device.type == "cpu" else None
    machines = network.gather(here)
    if None in machines or any(machine != machines[0] for machine in machines):
        return None
    size = _head_bytes(likes) + SETS * sum(map(_room, likes))
    memory: list[mmap.mmap] = []
    descriptor, mine = _reserve(size)
    everyone = network.gather(mine)
    try:
        if None not in everyone:
            memory = [_map(pid, fd, nonce, size) for pid, fd, nonce in everyone]
    except (OSError, ValueError):
        memory = []
    complete = all(network.gather(bool(memory)))  # now nobody opens it any more
    if descriptor is not None:
        os.close(descriptor)
    if not complete:
        return None
    return SharedMemory(network, topology, likes, timeout, memory, [pid for pid, *_ in everyone])


def _machine() -> list[object] | None:
    """Return what processes that can share memory have alike, or None where nobody can.

    Other namespaces are as good as other machines: an emulated network must not be passed by.
    """
    if not hasattr(os, "memfd_create") or platform.machine() != "x86_64":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:  # a sandbox; whoever raised here would leave the others waiting
        return None
    return [boot, os.getuid(), *spaces]


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
    """Return the bytes of the counters: a nonce, the step used, and one for each bucket."""
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
