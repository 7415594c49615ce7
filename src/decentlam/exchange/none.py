"""No exchange: a step that averages with nobody, one node alone, or a run that measures what
communication costs."""

from __future__ import annotations

from torch import Tensor

from decentlam.exchange.base import Exchange, Pending


class NoExchange(Exchange):
    """Every node keeps its own message."""

    silent = True

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        return Pending(terms=[(1.0, message)])
