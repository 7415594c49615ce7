"""Nodes of several processes: their gradients are summed into shards, the shards gathered again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.exchange.base import Pending, exchange_errors
from decentlam.exchange.network import Network
from decentlam.runtime.bucket import Bucket


def start(
    network: Network,
    timeout: timedelta,
    step: int,
    bucket: int,
    collective: Callable[..., Any],
    *tensors: Tensor,
) -> Pending:
    """Starts a collective of the processes of this node."""
    where, peer = network.where(step, bucket), "another process of its node"
    with exchange_errors(where, peer, timeout):
        work = collective(*tensors, group=network.intra_node_group, async_op=True)
    return Pending(where, timeout, network.is_nccl, receives=[(peer, work)])


class WithinNode:
    """Of one bucket: the sum of its gradients, and its shards, while they are under way."""

    def __init__(self, number: int, bucket: Bucket, network: Network, timeout: timedelta) -> None:
        self._number, self._bucket, self._network, self._timeout = number, bucket, network, timeout
        # NCCL reduces a shard. gloo's reduce_scatter is an all_reduce, too, but one that ends only
        # in wait(); so here the whole is reduced.
        shard = bucket.x[: len(bucket.x) // network.processes_per_node]
        self._sum = torch.empty_like(shard if network.is_nccl else bucket.g)
        self._summing: Pending | None = None
        self._gathering: Pending | None = None

    def _start(self, step: int, collective: Callable[..., Any], *tensors: Tensor) -> Pending:
        return start(self._network, self._timeout, step, self._number, collective, *tensors)

    def begin_sum(self, step: int) -> None:
        if self._network.is_nccl:
            self._summing = self._start(step, dist.reduce_scatter_tensor, self._sum, self._bucket.g)
        else:
            self._sum.copy_(self._bucket.g)
            self._summing = self._start(step, dist.all_reduce, self._sum)

    def summed(self, next_is_complete: bool) -> bool:
        """Whether the sum is there. Backward must not wait for it: the script may have a collective
        of its own before step(), and a process of the node be in it already. On a GPU only the GPU
        waits, and not even that if another bucket came in between."""
        if self._summing is None:
            return True
        return next_is_complete if self._network.is_nccl else self._summing.arrived()

    def mean(self, place: slice) -> Tensor | None:
        """This process's shard of the mean gradient; None if it was taken before."""
        if self._summing is None:
            return None
        self._summing.wait()
        self._summing = None
        part = self._sum if self._network.is_nccl else self._sum[place]
        return part.div_(self._network.processes_per_node)

    def begin_gather(self, step: int, shard: Tensor) -> None:
        """The shards of all processes of the node become the bucket."""
        gather = dist.all_gather_into_tensor
        self._gathering = self._start(step, gather, self._bucket.x, shard)

    def end_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def abandon(self) -> None:
        self._summing = None

    def nbytes(self) -> int:
        return self._sum.nbytes
