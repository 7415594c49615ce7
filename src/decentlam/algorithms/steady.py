"""DecentLaM for weights that change: what mixing moves enters the momentum through a filter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from decentlam.algorithms.base import check_between
from decentlam.algorithms.pmsgd import MomentumMethod


@dataclass(frozen=True)
class SteadyDecentLaM(MomentumMethod):
    """z = x - lr g - beta v;  x+ = W z;  s+ = mu s + (1 - mu) (z - x+)
    v+ = beta v + lr g + c (z - x+) + (1 - c) s+

    v is the velocity of DmSGD, plus what mixing does to the model, as in DecentLaM. Algorithm 2
    feeds that back at once, and on changing weights its fluctuations are amplified without end;
    here a share c passes at once and damps, the rest as its running mean. docs/methods derives
    c = 2 (1 - beta) and mu = 4 b / (1 + b)^2 with b = beta (1 - c).
    """

    mu: float | None = None
    share: float | None = None
    buffers = ("v", "s")
    needs_symmetric = True

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta)
        check_between(self, share=self.at_once)
        check_between(self, mu=self.filter)

    @cached_property
    def at_once(self) -> float:
        """c, at most a half: for little momentum any share will do."""
        return min(2 * (1 - self.beta), 0.5) if self.share is None else self.share

    @cached_property
    def filter(self) -> float:
        """mu; with exact averaging, the least for which disagreement dies out without swinging."""
        b = self.beta * (1 - self.at_once)
        return 4 * b / (1 + b) ** 2 if self.mu is None else self.mu

    def steady(self):
        """Return the form with half the share, for networks so large that they mix slowly."""
        return (replace(self, mu=None, share=self.at_once / 2),) if self.share is None else ()

    def message(self, x, g, state, step):
        kept = self.beta * step.lr_ratio
        if self.nesterov:
            ahead = torch.sub(x, g, alpha=(1 + self.beta) * step.lr)
            return ahead.sub_(state["v"], alpha=self.beta * kept)
        return torch.sub(x, g, alpha=step.lr).sub_(state["v"], alpha=kept)

    def update(self, x, g, mixed, state, step):
        v, s = state["v"], state["s"]
        kept, c, mu = self.beta * step.lr_ratio, self.at_once, self.filter
        if step.lr_ratio != 1:
            s.mul_(step.lr_ratio)
        taken = self.message(x, g, state, step).sub_(mixed)
        v.mul_(kept).add_(g, alpha=step.lr)
        s.lerp_(taken, 1 - mu)
        # Nesterov sends beta v: only 1/beta of this then cancels the local gradient in the end.
        weight = 1 / self.beta if self.nesterov and self.beta else 1.0
        v.add_(s, alpha=weight * (1 - c)).add_(taken, alpha=weight * c)
        x.copy_(mixed)
