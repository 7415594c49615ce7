"""Mixing between processes of one machine: neighbors read each other's messages where they are.

Nothing is sent and nothing received: a message is formed in its process's outbox, a number says
that it is there, and the update of a neighbor reads it. Before a buffer is written again, those who
read it two turns ago must be done.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from decentlam.algorithms import Reach
from decentlam.errors import ExchangeError
from decentlam.exchange.network import Network
from decentlam.exchange.outboxes import SETS, Outboxes
from decentlam.exchange.process_group import ProcessGroupExchange, Round, explained
from decentlam.topology import Topology


class SharedMemoryExchange(ProcessGroupExchange):
    """As its base, which still does the exact averages."""

    def __init__(
        self,
        network: Network,
        topology: Topology,
        timeout_seconds: float,
        tag: int,
        outboxes: Outboxes,
    ) -> None:
        super().__init__(network, topology, timeout_seconds, tag)
        self.clerk = None  # no core is free where processes share a machine, and nothing is sent
        self._outboxes = outboxes
        self._turn = 0  # steps begun with these outboxes; a step's number may go back
        self._readers: list[list[int]] = [[] for _ in range(SETS)]  # nodes, by set of buffers

    def open(self, slots: int, index: int, reach: Reach) -> list[Tensor]:
        self._turn += 1
        readers = self._readers[self._turn % SETS]
        while readers:
            with explained(self._place(0, index), f"node {readers[0]}", self.timeout):
                self._outboxes.done(self.network.place(readers[0]), self._turn - SETS).wait(
                    self.timeout
                )
            readers.pop(0)
        if reach is not Reach.NEIGHBORS:
            return []
        readers += self.topology.listeners(self.network.node, index)
        return [self._outboxes.buffer(self._outboxes.me, self._turn, s) for s in range(slots)]

    def close(self) -> None:
        self._outboxes.set_done(self._turn)

    def expect(self, messages: Mapping[int, Tensor], index: int, reach: Reach) -> None:
        """Nothing is received."""

    def start(
        self, slot: int, message: Tensor, index: int, reach: Reach, by_need: bool = False
    ) -> Round:
        if reach is not Reach.NEIGHBORS:
            return super().start(slot, message, index, reach)
        own = self._outboxes.buffer(self._outboxes.me, self._turn, slot)
        if message.data_ptr() != own.data_ptr():  # neighbors would read what is not meant
            raise ExchangeError(
                f"{self._place(slot, index)}: the message was not formed in its outbox; a step "
                "that failed cannot be repeated. Build a new optimizer, or use_network()."
            )
        row = self.topology.row(self.network.node, index)
        round = Round(
            [(row.get(self.network.node, 0.0), message)], self._place(slot, index), self.timeout
        )
        for j in self.topology.neighbors(self.network.node, index):
            process = self.network.place(j)
            theirs = self._outboxes.buffer(process, self._turn, slot)[: len(message)]
            round.terms.append((row[j], theirs))
            round.receives.append(
                (f"node {j}", self._outboxes.announced(process, self._turn, slot))
            )
        self._outboxes.announce(self._turn, slot)
        return round

    def outbox_bytes(self) -> int:
        return self._outboxes.nbytes()
