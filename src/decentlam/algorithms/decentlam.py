"""DecentLaM (Yuan et al., 2021, Algorithm 2): momentum built on the bias-corrected gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.exact import ExactDecentLaM
from decentlam.algorithms.pmsgd import MomentumMethod
from decentlam.algorithms.steady import SteadyDecentLaM


@dataclass(frozen=True)
class DecentLaM(MomentumMethod):
    """v+ = beta v + x - W (x - lr g);  x+ = x - v+

    This is the paper's recursion with v = lr m, so that nothing is divided by lr: x - W(x - lr g)
    is lr times its corrected gradient (17). v is rescaled when lr changes.
    """

    buffers = ("v",)
    needs_symmetric = True

    def steady(self):
        biased = SteadyDecentLaM(self.beta, self.nesterov)
        return (ExactDecentLaM(self.beta, self.nesterov), biased, *biased.steady())

    def message(self, x, g, state, step):
        return torch.sub(x, g, alpha=step.lr)

    def update(self, x, g, mixed, state, step):
        v, drift = state["v"], x - mixed
        v.mul_(self.beta * step.lr_ratio).add_(drift)
        if self.nesterov and step.lr > 0:  # at lr = 0 looking ahead would over-relax the gossip
            x.sub_(drift).sub_(v, alpha=self.beta)
        else:
            x.sub_(v)
