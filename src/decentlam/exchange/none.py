"""No exchange: a step that averages with nobody, or one node alone."""

from __future__ import annotations

from torch import Tensor

from decentlam.exchange.base import Exchange, Pending


class NoExchange(Exchange):
    """Every node keeps its own message, which is formed inside the update."""

    silent = True

    def message(self, bucket: int, size: int) -> Tensor:
        raise AssertionError("a silent exchange has no message")

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        raise AssertionError("a silent exchange sends nothing")
