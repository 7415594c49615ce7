"""DSGD (Lian et al., 2017): a gradient step, then the partial average. Equations (4)-(5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.base import Algorithm
from decentlam.algorithms.pmsgd import PmSGD


@dataclass(frozen=True)
class DSGD(Algorithm):
    """x+ = W (x - lr g)"""

    def alone(self):
        return PmSGD(0.0)

    def message(self, x, g, state, step):
        return torch.sub(x, g, alpha=step.lr)

    def update(self, x, g, mixed, state, step):
        x.copy_(mixed)
