"""Messages in 16 bits: what has changed since a neighbor was last told.

A rounded x - lr g would lose the gradient, which is far below the 8 bits that bfloat16 has for x.
The difference to what the neighbor already knows is as small as the last steps, and what rounding
leaves out of it is part of the next difference. Both ends keep what is known, to the bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decentlam.algorithms import Reach
from decentlam.exchange.network import Network
from decentlam.exchange.process_group import Payloads, ProcessGroupExchange, Round, chunks
from decentlam.topology import Topology

DTYPES = (torch.bfloat16,)


class DifferenceExchange(ProcessGroupExchange):
    """x + sum of w_j (known of j - known to j): rounding moves no average, since the same goes to
    one end as comes from the other. The first message to a neighbor is sent whole."""

    def __init__(
        self,
        network: Network,
        topology: Topology,
        timeout_seconds: float,
        tag: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(network, topology, timeout_seconds, tag)
        self.dtype = dtype
        self._of: dict[tuple[int, int, int], Tensor] = {}  # (bucket, node, payloads) -> known of it
        self._to: dict[tuple[int, int, int], Tensor] = {}  # what that node knows of this one
        self._packets: dict[tuple[int, int, str], Tensor] = {}

    def _round(self, slot: int, message: Tensor, index: int) -> tuple[Round, Payloads]:
        row = self.topology.row(self.network.node, index)
        incoming: Payloads = []
        round = Round([(1.0, message)], self._place(slot, index), self.timeout)
        for j in self.topology.neighbors(self.network.node, index):
            key = slot, j, len(message)
            known = self._of.get(key)
            if known is None:
                known = self._of[key] = torch.empty_like(message)
                incoming.append((j, known))
            else:
                packet = self._packet(slot, j, "in", message)
                incoming.append((j, packet))
                round.changes.append((known, packet))
            round.terms.append((row[j], known))
        return self._kept(round), incoming

    def _outgoing(self, slot: int, message: Tensor, index: int, round: Round) -> Payloads:
        row = self.topology.row(self.network.node, index)
        outgoing: Payloads = []
        for j in self.topology.listeners(self.network.node, index):
            key = slot, j, len(message)
            known = self._to.get(key)
            if known is None:
                known = self._to[key] = message.clone()
                outgoing.append((j, known))
            else:
                packet = self._packet(slot, j, "out", message)
                for z, k, change in zip(*map(chunks, (message, known, packet)), strict=True):
                    k.add_(change.copy_(z - k))
                outgoing.append((j, packet))
            round.terms.append((-row[j], known))
        return outgoing

    def _packet(self, slot: int, j: int, way: str, message: Tensor) -> Tensor:
        packet = self._packets.get((slot, j, way))
        if packet is None or packet.shape != message.shape:
            packet = torch.empty_like(message, dtype=self.dtype)
            self._packets[slot, j, way] = packet
        return packet

    def bytes_sent(self, message_bytes: int, index: int, reach: Reach) -> int:
        """As if no message were a first one."""
        sent = super().bytes_sent(message_bytes, index, reach)
        if reach is not Reach.NEIGHBORS or not self._to:
            return sent
        return sent * self.dtype.itemsize // next(iter(self._to.values())).element_size()

    def memory_bytes(self) -> int:
        held = [t for kept in (self._of, self._to, self._packets) for t in list(kept.values())]
        return super().memory_bytes() + sum(tensor.nbytes for tensor in held)


def check_differences(network: Network, topology: Topology) -> None:
    """Refuses what differences cannot carry, on every node alike."""
    if network.batched:
        raise ValueError("message_dtype works with gloo on CPUs; with NCCL leave it out")
    instead = "try ring, or one-peer-hypercube if the number of nodes is a power of two"
    if not topology.symmetric:
        raise ValueError(
            f"message_dtype needs weights that are the same in both directions, {topology!r} has "
            f"not; {instead}"
        )
    most = max(2, 2 * math.ceil(math.log2(network.num_nodes)))
    partners = "partners drawn at random"
    if topology.period is not None:
        met: list[set[int]] = [set() for _ in range(network.num_nodes)]
        for index in range(topology.period):
            for node, known in enumerate(met):
                known.update(topology.neighbors(node, index))
        count = max(map(len, met))
        if count <= most:
            return
        partners = f"{count} different neighbors"
    raise ValueError(
        "message_dtype keeps two copies of the model for every neighbor that a node ever has, and "
        f"{topology!r} gives it {partners}; {most} are allowed. Instead, {instead}"
    )
