"""Messages in 8 bits: a codec sends what has changed since a neighbor was last told.

The difference to what the neighbor already knows is as small as the last steps, and what rounding
leaves out of it is part of the next difference. Both ends keep what is known, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from decentlam.exchange.base import Exchange, Pending
from decentlam.exchange.codecs import BLOCK, Codec
from decentlam.exchange.neighbors import Neighbors
from decentlam.exchange.network import Network
from decentlam.topology import Topology

Key = tuple[int, int, int]  # bucket, node, payloads
_CHUNK = 512 * BLOCK  # elements; a codec goes over them several times, so they stay in the cache


class Differences(Exchange):
    """Wraps the exchange with neighbors: x + sum of w_j (known of j - known to j) is the mix.

    Rounding moves no average, since the same goes to one end of an edge as comes from the other.
    The first message to a neighbor is sent whole, and so is the first after `forget`.
    """

    only_reads = remembers = True

    def __init__(self, inner: Neighbors, codec: Codec) -> None:
        self._inner, self._codec = inner, codec
        self.threaded = inner.threaded
        self._known_of: dict[Key, Tensor] = {}  # what a node has told
        self._known_to: dict[Key, Tensor] = {}  # what it was told
        self._packets: dict[tuple[int, int, str], Tensor] = {}

    def message(self, bucket: int, payloads: int) -> Tensor:
        return self._inner.message(bucket, payloads)

    def receive(self, bucket: int, message: Tensor, step: int) -> None:
        row = self._inner.row(step)
        buffers: dict[int, Tensor] = {}
        changes: list[tuple[Tensor, Tensor]] = []
        terms = [(1.0, message)]
        for j in self._inner.neighbors(step):
            known = self._known_of.get((bucket, j, len(message)))
            if known is None:
                known = self._known_of[bucket, j, len(message)] = torch.empty_like(message)
                buffers[j] = known
            else:
                buffers[j] = self._packet(bucket, j, "in", message)
                changes.append((known, buffers[j]))
            terms.append((row[j], known))
        pending = self._inner.expect(bucket, step, buffers)
        pending.terms, pending.decode = terms, partial(self._decode, changes)

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        row = self._inner.row(step)
        tensors: dict[int, Tensor] = {}
        terms = []
        for j in self._inner.listeners(step):
            known = self._known_to.get((bucket, j, len(message)))
            if known is None:
                known = self._known_to[bucket, j, len(message)] = message.clone()
                tensors[j] = known
            else:
                tensors[j] = self._packet(bucket, j, "out", message)
                packets = self._chunks_of_packet(tensors[j])
                for z, k, packet in zip(_chunks(message), _chunks(known), packets, strict=True):
                    self._codec.encode(z - k, packet)
                    k.add_(self._codec.decode(packet, len(k)))
            terms.append((-row[j], known))
        pending = self._inner.answer(bucket, tensors)
        pending.terms += terms
        return pending

    def forget(self) -> None:
        self._known_of.clear()
        self._known_to.clear()

    def memory_bytes(self) -> dict[str, int]:
        kept = (self._known_of, self._known_to, self._packets)
        known = sum(t.nbytes for tensors in kept for t in list(tensors.values()))
        held = self._inner.memory_bytes()
        return {**held, "received": held["received"] + known}

    def _decode(self, changes: list[tuple[Tensor, Tensor]]) -> None:
        for known, packet in changes:
            for k, part in zip(_chunks(known), self._chunks_of_packet(packet), strict=True):
                k.add_(self._codec.decode(part, len(k)))

    def _packet(self, bucket: int, j: int, way: str, message: Tensor) -> Tensor:
        size = self._codec.packet_bytes(message.numel())
        packet = self._packets.get((bucket, j, way))
        if packet is None or len(packet) != size:
            packet = self._packets[bucket, j, way] = message.new_empty(size, dtype=torch.uint8)
        return packet

    def _chunks_of_packet(self, packet: Tensor) -> Sequence[Tensor]:
        return packet.split(self._codec.packet_bytes(_CHUNK))


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Small enough for the cache: what is written can be read again at once."""
    return tensor.view(-1).split(_CHUNK)


def check_differences(network: Network, topology: Topology) -> None:
    """Refuses what differences cannot carry, on every node alike."""
    if network.is_nccl:
        raise ValueError(
            "message_dtype=torch.int8 works with gloo on CPUs; with NCCL use torch.float16"
        )
    instead = "use torch.float16, or try base-2 or ring"
    most = max(2, 2 * math.ceil(math.log2(network.num_nodes)))
    partners = "draws them at random"
    if topology.period is not None:
        met: list[set[int]] = [set() for _ in range(network.num_nodes)]
        for step in range(topology.period):
            for node, known in enumerate(met):
                known.update(topology.neighbors(node, step))
        count = max(map(len, met))
        if count <= most:
            return
        partners = f"has {count} different ones"
    raise ValueError(
        "message_dtype=torch.int8 keeps two copies of the model for every neighbor that a node "
        f"ever has, at most {most} here; {topology!r} {partners}. Instead, {instead}"
    )
