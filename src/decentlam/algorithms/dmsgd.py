"""DmSGD (Algorithm 1 of the paper): a momentum step, then the partial average."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.pmsgd import MomentumMethod, momentum


@dataclass(frozen=True)
class DmSGD(MomentumMethod):
    """m+ = beta m + g;  x+ = W (x - lr m+)"""

    buffers = ("m",)

    def message(self, x, g, state, step):
        direction = momentum(g, state["m"], self.beta, self.nesterov)
        return torch.sub(x, direction, alpha=step.lr)

    def update(self, x, g, mixed, state, step):
        state["m"].mul_(self.beta).add_(g)
        x.copy_(mixed)
