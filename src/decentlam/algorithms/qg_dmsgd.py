"""QG-DmSGD (Lin et al., 2021), heavy-ball variant: momentum from the model's own displacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.base import check_between
from decentlam.algorithms.pmsgd import MomentumMethod


@dataclass(frozen=True)
class QGDmSGD(MomentumMethod):
    """x+ = W (x - lr (beta q + g));  q+ = mu q + (1 - mu) (x - x+) / lr

    Kept in velocity form v = lr q, so that nothing is divided by lr. mu is beta unless given.
    """

    mu: float | None = None
    buffers = ("v",)

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta, mu=self.beta if self.mu is None else self.mu)

    def message(self, x, g, state, step):
        h = torch.mul(state["v"], self.beta * step.lr_ratio).add_(g, alpha=step.lr)
        if self.nesterov:
            h.mul_(self.beta).add_(g, alpha=step.lr)
        return torch.sub(x, h, out=h)

    def update(self, x, g, mixed, state, step):
        mu = self.beta if self.mu is None else self.mu
        state["v"].mul_(mu * step.lr_ratio).add_(x - mixed, alpha=1 - mu)
        x.copy_(mixed)
