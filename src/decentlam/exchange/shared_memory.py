"""Mixing between processes of one machine: neighbors read each other's messages where they are.

Nothing is sent and nothing received: a message is formed in its process's shared memory, a counter
says that it is there, and the update of a neighbor reads it. Before a buffer is written again,
those who read it two steps ago must be done.
"""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from decentlam.exchange.base import Exchange, Pending, exchange_errors
from decentlam.exchange.network import Network
from decentlam.exchange.shared_buffers import SETS, SharedBuffers
from decentlam.topology import Topology


class SharedMemory(Exchange):
    """The messages of all neighbors, read in place."""

    only_reads = True

    def __init__(
        self, network: Network, topology: Topology, buffers: SharedBuffers, timeout: timedelta
    ) -> None:
        self._network, self._topology = network, topology
        self._buffers, self._timeout = buffers, timeout
        self._count = 0  # steps begun with these buffers; a step's number may go back
        self._readers: list[list[int]] = [[] for _ in range(SETS)]  # nodes, by set of buffers

    def begin(self, step: int) -> None:
        self._count += 1
        readers = self._readers[self._count % SETS]
        while readers:
            rank = self._network.rank_of(readers[0])
            with exchange_errors(self._network.where(step, 0), f"node {readers[0]}", self._timeout):
                self._buffers.used(rank, self._count - SETS).wait(self._timeout)
            readers.pop(0)
        readers += self._topology.listeners(self._network.node, step)

    def message(self, bucket: int, payloads: int) -> Tensor:
        return self._buffers.own(self._count, bucket)[:payloads]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        where, node = self._network.where(step, bucket), self._network.node
        row = self._topology.row(node, step)
        pending = Pending(where, self._timeout, terms=[(row.get(node, 0.0), message)])
        for j in self._topology.neighbors(node, step):
            rank = self._network.rank_of(j)
            theirs = self._buffers.of(rank, self._count, bucket)[: len(message)]
            pending.terms.append((row[j], theirs))
            formed = self._buffers.formed(rank, self._count, bucket)
            pending.receives.append((f"node {j}", formed))
        self._buffers.set_formed(self._count, bucket)
        # As if they were sent.
        pending.bytes_sent = message.nbytes * len(self._topology.listeners(node, step))
        return pending

    def end(self) -> None:
        self._buffers.set_used(self._count)

    def memory_bytes(self) -> dict[str, int]:
        return {"messages": self._buffers.nbytes(), "received": 0}
