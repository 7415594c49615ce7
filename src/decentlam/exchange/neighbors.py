"""Messages to the neighbors of this node and back, over torch.distributed: gloo or NCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.exchange.base import Exchange, Pending
from decentlam.network.network import Network, connect
from decentlam.topology import Topology, resolve

Tensors = Mapping[int, Tensor]  # by node: of it, or for it


class Neighbors(Exchange):
    """Sends each bucket whole to the neighbors of this node and receives theirs.

    `tag` is that of the first bucket: tags keep gloo's messages apart in whatever order they are
    sent.
    """

    def __init__(
        self,
        network: Network,
        topology: Topology,
        buffers: Sequence[Tensor],
        timeout: timedelta,
        tag: int,
    ) -> None:
        self.network, self.topology, self.buffers = network, topology, buffers
        self._timeout, self._tag = timeout, tag
        self._received: dict[tuple[int, int], Tensor] = {}  # (bucket, neighbor's position)
        self._expected: dict[int, tuple[Pending, Tensors]] = {}

    def begin(self, step: int, sizes: Sequence[int]) -> None:
        # All receives first: a gloo send moves no byte until its receive is posted.
        for bucket, size in enumerate(sizes):
            self.receive(bucket, self.message(bucket, size), step)

    def message(self, bucket: int, size: int) -> Tensor:
        return self.buffers[bucket][:size]

    def receive(self, bucket: int, message: Tensor, step: int) -> None:
        """Post the receives of a bucket, for messages of this shape."""
        row = self.topology.row(self.network.node, step)
        buffers: dict[int, Tensor] = {}
        for position, j in enumerate(j for j in row if j != self.network.node):
            buffers[j] = reused(self._received, (bucket, position), message, message.dtype)
        pending = self.expect(bucket, step, buffers)
        pending.terms = [(row.get(self.network.node, 0.0), message)]
        pending.terms += [(row[j], buffer) for j, buffer in buffers.items()]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        listeners = self.topology.listeners(self.network.node, step)
        return self.answer(bucket, dict.fromkeys(listeners, message))

    # What `Rounded`, which sends something else than the message, needs besides ------------------

    def expect(self, bucket: int, step: int, buffers: Tensors) -> Pending:
        """Post the receives of a bucket into these buffers."""
        network = self.network
        pending = Pending(network, step, bucket, self._timeout)
        pending.keep()
        self._expected[bucket] = pending, buffers
        if not network.is_nccl:
            assert network.group is not None
            for j, buffer in buffers.items():
                with pending.posting(f"node {j}"):
                    # What dist.irecv calls, in a third of the time.
                    work = network.group.recv([buffer], network.rank_of(j), self._tag + bucket)
                pending.works.append((f"node {j}", work))
        return pending

    def answer(self, bucket: int, tensors: Tensors) -> Pending:
        """Send each listener its tensor; return what was expected, which is now pending."""
        network, (pending, expected) = self.network, self._expected.pop(bucket)
        pending.bytes_sent = sum(tensor.nbytes for tensor in tensors.values())
        if network.is_nccl:
            self._post_batch(expected, tensors, pending)
            return pending
        assert network.group is not None
        for j, tensor in tensors.items():
            with pending.posting(f"node {j}"):
                work = network.group.send([tensor], network.rank_of(j), self._tag + bucket)
            pending.works.append((f"node {j}", work))
        return pending

    def _post_batch(self, expected: Tensors, tensors: Tensors, pending: Pending) -> None:
        """Post one bucket's receives and sends as a batch, as NCCL wants them: it has no tags, so
        all processes post in one order and no collective of the script may come between."""
        group, rank_of = self.network.exact_group, self.network.global_rank_of
        batch = [dist.P2POp(dist.irecv, z, rank_of(j), group) for j, z in expected.items()]
        batch += [dist.P2POp(dist.isend, z, rank_of(j), group) for j, z in tensors.items()]
        if batch:
            with pending.posting("its neighbors"):
                works = dist.batch_isend_irecv(batch)
            pending.works += [("a neighbor", work) for work in works]


def reused(
    held: dict[tuple[int, int], Tensor], key: tuple[int, int], like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return memory of the shape of `like`, the same at every call unless it must be larger."""
    memory = held.get(key)
    if memory is None or len(memory) < like.numel() or memory.dtype is not dtype:
        memory = held[key] = like.new_empty(like.numel(), dtype=dtype)
    return memory[: like.numel()].view(like.shape)


def neighbor_exchange(
    topology: str | Topology,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    timeout_seconds: float = 600.0,
    tag: int = 1 << 13,
) -> Neighbors:
    """Return an exchange between the processes of a group, for use outside of any optimizer.

    For every bucket of a step call `receive(bucket, message, step)`, then
    `pending = send(bucket, message, step)`. The weighted sum of the terms that `pending.wait()`
    returns is the mix; after that you may overwrite the message. See examples/ddp_hook.py.

    Args:
        topology: A name, or a `Topology` with as many nodes as the group has processes.
        group: The processes, one node each. Default: the default group.
        device: The device of the messages.
        timeout_seconds: How long to wait for a neighbor.
        tag: The first tag of these messages in the group; bucket k uses tag + k.
    """
    network = connect(group, device=device, batches=True)
    timeout = timedelta(seconds=timeout_seconds)
    return Neighbors(network, resolve(topology, network.num_nodes), (), timeout, tag)
