"""Messages in 16 bits: all ends of an edge use the same rounded values, so no average moves."""

from __future__ import annotations

import torch
from torch import Tensor

from decentlam.exchange.base import Exchange, Pending
from decentlam.exchange.neighbors import Neighbors

ROUNDED = (torch.float16, torch.bfloat16)


class Rounded(Exchange):
    """Wraps the exchange with neighbors: z + sum of w_j (r(z_j) - r(z)) is the mix, r the rounding.

    W r(z) alone would lose the gradient, which is far below 16 bits of x. Here a node keeps its own
    message whole, and what it adds at one end of an edge is taken away at the other: rounding moves
    no average. Nodes that are equal stay so. Nothing is remembered, so any symmetric weights do.
    """

    only_reads = True

    def __init__(self, inner: Neighbors, dtype: torch.dtype) -> None:
        self._inner, self._dtype = inner, dtype
        self.threaded = inner.threaded
        self._buffers: dict[tuple[int, int], Tensor] = {}  # (bucket, neighbor's place; -1: own)

    def message(self, bucket: int, payloads: int) -> Tensor:
        return self._inner.message(bucket, payloads)

    def receive(self, bucket: int, message: Tensor, step: int) -> None:
        row, neighbors = self._inner.row(step), self._inner.neighbors(step)
        buffers = {j: self._buffer(bucket, k, message) for k, j in enumerate(neighbors)}
        pending = self._inner.expect(bucket, step, buffers)
        pending.terms = [(1.0, message), *((row[j], buffer) for j, buffer in buffers.items())]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        row, listeners = self._inner.row(step), self._inner.listeners(step)
        if not listeners:
            return self._inner.answer(bucket, {})
        packet = self._buffer(bucket, -1, message)
        packet.copy_(message)
        if self._dtype is torch.float16:
            most = torch.finfo(self._dtype).max
            packet.clamp_(-most, most)  # beyond it is infinite
        pending = self._inner.answer(bucket, dict.fromkeys(listeners, packet))
        pending.terms.append((-sum(row[j] for j in listeners), packet))
        return pending

    def memory_bytes(self) -> dict[str, int]:
        buffers = list(self._buffers.items())
        own = sum(t.nbytes for (_, place), t in buffers if place < 0)
        return {"messages": own, "received": sum(t.nbytes for _, t in buffers) - own}

    def _buffer(self, bucket: int, place: int, message: Tensor) -> Tensor:
        buffer = self._buffers.get((bucket, place))
        if buffer is None or buffer.shape != message.shape:
            buffer = torch.empty_like(message, dtype=self._dtype)
            self._buffers[bucket, place] = buffer
        return buffer
