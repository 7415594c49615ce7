"""Messages in 16 bits: both ends of an edge use the same rounded values, so no average moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decentlam.exchange.base import Exchange, Pending
from decentlam.exchange.neighbors import Neighbors, reused

ROUNDED = (torch.float16, torch.bfloat16)


class Rounded(Exchange):
    """Wraps the exchange with neighbors: z + sum of w_j (r(z_j) - r(z)) is the mix, r the rounding.

    W r(z) alone would lose the gradient, which is far below 16 bits of x. Here a node keeps its own
    message whole, and what it adds at one end of an edge is taken away at the other: rounding moves
    no average. Nodes that are equal stay so. Nothing is remembered, so any symmetric weights do.

    What lies behind the first `whole` elements of a bucket's message are second moments. They need
    the range of bfloat16, in whose bits they travel: float16 has no number below 6e-8.
    """

    def __init__(self, inner: Neighbors, dtype: torch.dtype, whole: Sequence[int]) -> None:
        self._inner, self._dtype, self._whole = inner, dtype, whole
        self._buffers: dict[tuple[int, int], Tensor] = {}  # (bucket, neighbor's position; -1: own)

    def begin(self, step: int, sizes: Sequence[int]) -> None:
        inner = self._inner
        row = inner.topology.row(inner.network.node, step)
        neighbors = [j for j in row if j != inner.network.node]
        for bucket, size in enumerate(sizes):
            message = inner.message(bucket, size)
            buffers = {j: self._buffer(bucket, k, message) for k, j in enumerate(neighbors)}
            pending = inner.expect(bucket, step, buffers)
            pending.terms = [(1.0, message), *((row[j], buffer) for j, buffer in buffers.items())]

    def message(self, bucket: int, size: int) -> Tensor:
        return self._inner.message(bucket, size)

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        topology, node = self._inner.topology, self._inner.network.node
        row, listeners = topology.row(node, step), topology.listeners(node, step)
        if not listeners:
            return self._inner.answer(bucket, {})
        packet, whole = self._buffer(bucket, -1, message), self._whole[bucket]
        packet[:whole].copy_(message[:whole])
        if self._dtype is torch.float16:
            most = torch.finfo(self._dtype).max
            packet[:whole].clamp_(-most, most)  # beyond it is infinite
        packet[whole:].view(torch.bfloat16).copy_(message[whole:])
        pending = self._inner.answer(bucket, dict.fromkeys(listeners, packet))
        pending.terms.append((-sum(row[j] for j in listeners), packet))
        return pending

    def _buffer(self, bucket: int, position: int, message: Tensor) -> Tensor:
        return reused(self._buffers, (bucket, position), message, self._dtype)
