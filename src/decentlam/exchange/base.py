"""The interface of every exchange: how the message of a step gets mixed.

    exchange.begin(step, sizes)                     # once per step, before any message is formed
    message = exchange.message(bucket, size)        # the buffer in which the message is formed
    pending = exchange.send(bucket, message, step)  # for every bucket, in bucket order
    terms = pending.wait()                          # the sum of weight * tensor is the mix
    exchange.end()                                  # once per step, when every mix was used

The caller sums the terms inside its update, piece by piece, so that each received byte is read from
memory once.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from decentlam.network.network import Network, exchange_error, exchange_errors

Terms = list[tuple[float, Tensor]]
Work = Any  # torch's work objects, and what can be waited for as they are


@dataclass(eq=False)
class Pending:
    """The exchange of one bucket while it is under way."""

    network: Network
    step: int
    bucket: int
    timeout: timedelta
    terms: Terms = field(default_factory=list)
    works: list[tuple[str, Work]] = field(default_factory=list)  # with whom
    bytes_sent: int = 0

    def wait(self) -> Terms:
        """Block until everything has arrived and left; return the terms of the mix."""
        while self.works:
            peer, work = self.works[0]
            try:
                # With a timeout NCCL's wait would block the CPU; without one only the GPU waits,
                # and the process group's own timeout holds.
                work.wait() if self.network.is_nccl else work.wait(self.timeout)
            except RuntimeError as error:
                raise exchange_error(self.where, peer, self.timeout, error) from error
            self.works.pop(0)
        _unfinished.discard(self)
        return self.terms

    @property
    def where(self) -> str:
        """The node, step and bucket, as text for errors."""
        return self.network.where(self.step, self.bucket)

    def posting(self, peer: str) -> contextlib.AbstractContextManager[None]:
        """Around the post of a send or a receive: turns the backend's error into ours."""
        return exchange_errors(self.where, peer, self.timeout)

    def arrived(self) -> bool:
        """Return True if `wait` would not block; gloo can tell it of collectives only."""
        return all(work.is_completed() for _, work in self.works)

    def keep(self) -> None:
        """Keep the buffers alive until `wait` returns, even if the optimizer is dropped before.

        gloo breaks a connection when a buffer or work object in use is dropped, and AWC-DmSGD's
        messages are always under way.
        """
        _unfinished.add(self)


_unfinished: set[Pending] = set()


def forget_unfinished() -> None:
    """Drop what is still under way, because its process group is about to be left."""
    _unfinished.clear()


class Exchange(ABC):
    """Mixes the messages of one kind of step; nobody subclasses an implementation."""

    silent = False  # True: the node's own message is the mix, and no message is formed or stored

    def begin(self, step: int, sizes: Sequence[int]) -> None:
        """Prepare a step whose buckets have messages of these sizes: post its receives, wait until
        its buffers may be written."""
        return

    @abstractmethod
    def message(self, bucket: int, size: int) -> Tensor:
        """Return the flat buffer of `size` elements in which the message must be formed."""

    @abstractmethod
    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        """Start to mix a message, which must not change until it was waited for."""

    def end(self) -> None:
        """Tell the others that their messages of this step were used."""
        return


class NoExchange(Exchange):
    """No exchange, for a step that averages with nobody: the message is formed in the update."""

    silent = True

    def message(self, bucket: int, size: int) -> Tensor:
        raise AssertionError("a silent exchange has no message")

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        raise AssertionError("a silent exchange sends nothing")


def combine(terms: Sequence[tuple[float, Tensor]], out: Tensor | None = None) -> Tensor:
    """Return the weighted sum, in as few operations as it takes, in `out` if there is one."""
    (weight, first), rest = terms[0], list(terms[1:])
    if len(rest) == 1 and abs(weight + rest[0][0] - 1.0) < 1e-15:
        return torch.lerp(first, rest[0][1], rest[0][0], out=out)  # one operation instead of two
    if weight == 1.0 and rest:
        total, rest = torch.add(first, rest[0][1], alpha=rest[0][0], out=out), rest[1:]
    else:
        total = first if weight == 1.0 else torch.mul(first, weight, out=out)
    for weight, term in rest:
        total.add_(term, alpha=weight)
    return total
