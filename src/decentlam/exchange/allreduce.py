"""The exact average over all nodes, by torch's own all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Reach
from decentlam.exchange.base import Exchange, Pending
from decentlam.network.network import Network


class AllReduce(Exchange):
    """Sums each bucket over all nodes, in the order of the buckets."""

    def __init__(self, network: Network, buffers: Sequence[Tensor], timeout: timedelta) -> None:
        self._network, self._buffers, self._timeout = network, buffers, timeout

    def message(self, bucket: int, size: int) -> Tensor:
        return self._buffers[bucket][:size]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        network = self._network
        sent = int(Reach.EVERYONE.messages_sent(network.num_nodes, 0) * message.nbytes)
        terms = [(1.0 / network.num_nodes, message)]
        pending = Pending(network, step, bucket, self._timeout, terms, bytes_sent=sent)
        with pending.posting("everyone"):
            work = dist.all_reduce(message, group=network.exact_group, async_op=True)
        pending.works.append(("everyone", work))
        return pending
