"""The average of nodes that have taken local steps, with a correction for each node's own data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.base import Algorithm, check_number


@dataclass(frozen=True)
class LocalAverage(Algorithm):
    """x+ = W x;  e+ = e + correction (x - x+) / lr, with lr the sum of the rates since the last mix

    An optimizer of the node's own has moved x since the last mix, so no gradient is read. e is the
    part of that which is due to the node's own data: zero on average, and each local step takes lr
    e off x. `delayed`: x has moved on since the message left, when it was `sent`; what mixing
    changes is added to where x is now.
    """

    every: str = "16 steps"  # for the agreement of all nodes
    correction: float = 0.2
    delayed: bool = False

    def __post_init__(self) -> None:
        check_number("correction (0.2 is usual)", self.correction, most=1.0)

    @property
    def buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("e", "sent") if self.delayed else ("e",)

    def linear(self) -> tuple[Algorithm, float]:
        return _Round(self.correction), 1.0

    def message(self, x, g, state, step):
        return state["sent"] if self.delayed else x

    def update(self, x, g, mixed, state, step):
        moved = (state["sent"] if self.delayed else x) - mixed
        if step.lr > 0:
            state["e"].add_(moved, alpha=self.correction / step.lr)
        x.sub_(moved)


@dataclass(frozen=True)
class _Round(Algorithm):
    """z = x - lr g - y;  x+ = W z;  y+ = y + correction (z - x+)

    `LocalAverage` from one mix to the next, with y what the local steps take off for e: the linear
    recursion by which its stability is judged.
    """

    correction: float
    buffers = ("y",)

    def message(self, x, g, state, step):
        return torch.sub(x, g, alpha=step.lr).sub_(state["y"])

    def update(self, x, g, mixed, state, step):
        moved = self.message(x, g, state, step).sub_(mixed)
        state["y"].add_(moved, alpha=self.correction)
        x.copy_(mixed)
