"""The exact average over all nodes, by torch's own all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Reach
from decentlam.exchange.base import Exchange, Pending, exchange_errors
from decentlam.exchange.network import Network


class AllReduce(Exchange):
    """Sums each bucket over all nodes, in the order of the buckets."""

    def __init__(self, network: Network, buffers: Sequence[Tensor], timeout: timedelta) -> None:
        self._network = network
        self._buffers = buffers
        self._timeout = timeout

    def message(self, bucket: int, payloads: int) -> Tensor:
        return self._buffers[bucket][:payloads]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        where = self._network.where(step, bucket)
        with exchange_errors(where, "everyone", self._timeout):
            work = dist.all_reduce(message, group=self._network.exact_group, async_op=True)
        terms = [(1.0 / self._network.num_nodes, message)]
        pending = Pending(where, self._timeout, self._network.is_nccl, terms, [("everyone", work)])
        messages = Reach.EVERYONE.messages_sent(self._network.num_nodes, 0)
        pending.bytes_sent = int(messages * message.nbytes)
        return pending
