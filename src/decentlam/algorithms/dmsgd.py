"""DmSGD (Algorithm 1 of the paper): a momentum step, then the partial average."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.base import Algorithm, check_between
from decentlam.algorithms.momentum import momentum
from decentlam.algorithms.pmsgd import PmSGD


@dataclass(frozen=True)
class DmSGD(Algorithm):
    """m+ = beta m + g;  x+ = W (x - lr m+)"""

    beta: float = 0.9
    nesterov: bool = False
    buffers = ("m",)

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta)

    def alone(self):
        return PmSGD(self.beta, self.nesterov)

    def message(self, x, g, state, step):
        direction = momentum(g, state["m"], self.beta, self.nesterov)
        return torch.sub(x, direction, alpha=step.lr)

    def update(self, x, g, mixed, state, step):
        state["m"].mul_(self.beta).add_(g)
        x.copy_(mixed)
