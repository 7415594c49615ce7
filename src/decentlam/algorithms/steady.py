"""DecentLaM for weights that change: what mixing moves enters the momentum through a filter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.base import Algorithm, check_between, momentum


@dataclass(frozen=True)
class SteadyDecentLaM(Algorithm):
    """z = x - lr g - beta v;  x+ = W z;  s+ = mu s + (1 - mu) (z - x+);  v+ = beta v + lr g + s+

    v is the velocity of DmSGD, plus what mixing does to the model, as in DecentLaM: this removes
    the bias of momentum. Algorithm 2 feeds that back at once, and on changing weights its
    fluctuations are amplified without end. Here the filter s passes on their mean only. Mixing
    keeps the node average, so the average takes the very steps of momentum SGD. The fixed point on
    static weights is DecentLaM's. docs/stability.md derives mu = 1 - (1 - beta)^2.
    """

    beta: float = 0.9
    nesterov: bool = False
    mu: float | None = None
    buffers = ("v", "s")

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta)
        check_between(self, mu=self.filter)

    @property
    def filter(self) -> float:
        return 1 - (1 - self.beta) ** 2 if self.mu is None else self.mu

    @property
    def needs_symmetric(self) -> bool:
        return True

    def message(self, x, g, state, step):
        h = momentum(g * step.lr, state["v"], self.beta * step.lr_ratio, False)
        if self.nesterov:
            h.mul_(self.beta).add_(g, alpha=step.lr)
        return torch.sub(x, h, out=step.out)

    def update(self, x, g, mixed, state, step):
        v, s = state["v"], state["s"]
        v.mul_(self.beta * step.lr_ratio).add_(g, alpha=step.lr)  # from here on as in message
        sent = x - (v * self.beta).add_(g, alpha=step.lr) if self.nesterov else x - v
        s.mul_(self.filter * step.lr_ratio).add_(sent.sub_(mixed), alpha=1 - self.filter)
        # Nesterov sends beta v: only 1/beta of s then cancels the local gradient in the limit.
        v.add_(s, alpha=1 / self.beta if self.nesterov and self.beta else 1.0)
        x.copy_(mixed)
