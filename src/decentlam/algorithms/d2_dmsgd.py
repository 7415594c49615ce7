"""D2-DmSGD: exact diffusion (Yuan et al., 2020) with momentum in the local step; no bias at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.exact import ExactDecentLaM
from decentlam.algorithms.pmsgd import MomentumMethod, momentum


@dataclass(frozen=True)
class D2DmSGD(MomentumMethod):
    """m+ = beta m + g;  p+ = x - lr m+;  x+ = (I + W)/2 (p+ + x - p)

    The first step has x - p = 0. Half of each node's own value is kept because the plain W
    diverges as soon as an eigenvalue lies below -1/3.
    """

    buffers = ("m", "c")  # c = x - p, what the last averaging moved
    balanced = ("c",)
    needs_symmetric = True

    def steady(self):
        """Return the form that is as exact, and forgets more slowly what mixing moved."""
        return (ExactDecentLaM(self.beta, self.nesterov),)

    def message(self, x, g, state, step):
        return self._local_step(x, g, state, step).add_(state["c"])

    def update(self, x, g, mixed, state, step):
        m, c = state["m"], state["c"]
        p = self._local_step(x, g, state, step)
        m.mul_(self.beta).add_(g)
        x.copy_(c).add_(p).add_(mixed).mul_(0.5)
        torch.sub(x, p, out=c)

    def _local_step(self, x, g, state, step):
        return torch.sub(x, momentum(g, state["m"], self.beta, self.nesterov), alpha=step.lr)
