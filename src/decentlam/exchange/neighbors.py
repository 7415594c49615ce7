"""Messages to the neighbors of this node and back, over torch.distributed: gloo or NCCL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.exchange.base import Exchange, Pending, exchange_errors
from decentlam.exchange.network import Network, connect
from decentlam.topology import Topology, resolve

Tensors = Mapping[int, Tensor]  # by node: of it, or for it


class Wire(ABC):
    """Posts receives and sends of one bucket, and adds them to what is pending."""

    @abstractmethod
    def receive(self, bucket: int, buffers: Tensors, pending: Pending) -> None:
        """Into these buffers, from these nodes; before the bucket is sent."""

    @abstractmethod
    def send(self, bucket: int, tensors: Tensors, pending: Pending) -> None:
        """These tensors to these nodes."""


class GlooWire(Wire):
    """A gloo send moves no byte until its receive is posted, and a receive that is already there
    saves the round trip. Tags keep buckets apart in whatever order they are sent.

    The group's own `recv` and `send` are what dist.irecv and isend call, in a third of the time.
    """

    def __init__(self, network: Network, tag: int) -> None:
        assert network.group is not None
        self._network, self._group, self._tag = network, network.group, tag

    def receive(self, bucket: int, buffers: Tensors, pending: Pending) -> None:
        for j, buffer in buffers.items():
            with exchange_errors(pending.where, f"node {j}", pending.timeout):
                work = self._group.recv([buffer], self._network.rank_of(j), self._tag + bucket)
            pending.receives.append((f"node {j}", work))

    def send(self, bucket: int, tensors: Tensors, pending: Pending) -> None:
        for j, tensor in tensors.items():
            with exchange_errors(pending.where, f"node {j}", pending.timeout):
                work = self._group.send([tensor], self._network.rank_of(j), self._tag + bucket)
            pending.sends.append((f"node {j}", work))


class NcclWire(Wire):
    """NCCL has no tags and wants the sends and receives of a bucket posted as one batch, and what
    all processes post in a group in one order: no collective of the script may come between."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._expected: dict[int, Tensors] = {}

    def receive(self, bucket: int, buffers: Tensors, pending: Pending) -> None:
        self._expected[bucket] = buffers

    def send(self, bucket: int, tensors: Tensors, pending: Pending) -> None:
        group, rank_of = self._network.exact_group, self._network.global_rank_of
        expected = self._expected.pop(bucket)
        batch = [dist.P2POp(dist.irecv, z, rank_of(j), group) for j, z in expected.items()]
        batch += [dist.P2POp(dist.isend, z, rank_of(j), group) for j, z in tensors.items()]
        if batch:
            with exchange_errors(pending.where, "its neighbors", pending.timeout):
                works = dist.batch_isend_irecv(batch)
            pending.receives += [("a neighbor", work) for work in works]


class Neighbors(Exchange):
    """Sends each bucket whole to the neighbors of this node and receives theirs."""

    only_reads = True

    def __init__(
        self,
        network: Network,
        topology: Topology,
        buffers: Sequence[Tensor],
        timeout: timedelta,
        wire: Wire,
    ) -> None:
        self.network = network
        self.topology = topology
        self.wire = wire
        self.threaded = not network.is_nccl  # a GPU works beside the training anyway
        self._buffers = buffers
        self._timeout = timeout
        self._received: dict[tuple[int, int], Tensor] = {}  # (bucket, neighbor's place)
        self._expected: dict[int, Pending] = {}

    def message(self, bucket: int, payloads: int) -> Tensor:
        return self._buffers[bucket][:payloads]

    def receive(self, bucket: int, message: Tensor, step: int) -> None:
        buffers: dict[int, Tensor] = {}
        for place, j in enumerate(self.neighbors(step)):
            buffer = self._received.get((bucket, place))
            if buffer is None or buffer.shape != message.shape:
                buffer = self._received[bucket, place] = torch.empty_like(message)
            buffers[j] = buffer
        row = self.row(step)
        pending = self.expect(bucket, step, buffers)
        pending.terms = [(row.get(self.network.node, 0.0), message)]
        pending.terms += [(row[j], buffer) for j, buffer in buffers.items()]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        return self.answer(bucket, dict.fromkeys(self.listeners(step), message))

    def memory_bytes(self) -> dict[str, int]:
        return {
            "messages": 0,
            "received": sum(buffer.nbytes for buffer in list(self._received.values())),
        }

    # What a codec, which sends something else than the message, needs besides -------------------

    def expect(self, bucket: int, step: int, buffers: Tensors) -> Pending:
        """Posts the receives of a bucket into these buffers."""
        where, is_nccl = self.network.where(step, bucket), self.network.is_nccl
        pending = self._expected[bucket] = Pending(where, self._timeout, is_nccl)
        pending.keep()
        self.wire.receive(bucket, buffers, pending)
        return pending

    def answer(self, bucket: int, tensors: Tensors) -> Pending:
        """Sends each listener its tensor; what was expected is pending."""
        pending = self._expected.pop(bucket)
        pending.bytes_sent = sum(tensor.nbytes for tensor in tensors.values())
        self.wire.send(bucket, tensors, pending)
        return pending

    def row(self, step: int) -> dict[int, float]:
        """The weights of this node."""
        return self.topology.row(self.network.node, step)

    def neighbors(self, step: int) -> list[int]:
        """The nodes this one hears."""
        return self.topology.neighbors(self.network.node, step)

    def listeners(self, step: int) -> list[int]:
        """The nodes that hear this one."""
        return self.topology.listeners(self.network.node, step)


def neighbor_exchange(
    topology: str | Topology,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    timeout_seconds: float = 600.0,
    tag: int = 1 << 13,
) -> Exchange:
    """Mixes messages over the processes of a torch.distributed group, outside of any optimizer.

    For every bucket of a step, `receive(bucket, message, step)` comes before
    `pending = send(bucket, message, step)`; the weighted sum of `pending.wait()` is the mix, and
    after `pending.finish()` the message may be overwritten. See examples/ddp_hook.py.

    Args:
        topology: A name, or a `Topology` with as many nodes as the group has processes.
        group: The processes, one node each; the default group if left out.
        device: Where messages live.
        timeout_seconds: How long to wait for a neighbor.
        tag: Keeps these messages apart from others of the group; bucket k has tag + k.
    """
    network = connect(group, device=device, batches=True)
    wire = NcclWire(network) if network.is_nccl else GlooWire(network, tag)
    timeout = timedelta(seconds=timeout_seconds)
    return Neighbors(network, resolve(topology, network.num_nodes), (), timeout, wire)
