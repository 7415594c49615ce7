"""DecentLaM without bias on weights that change: an integral takes each node's own pull away."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.pmsgd import MomentumMethod

AT_ONCE = 1 / 2  # of what mixing takes away, into the velocity
INTEGRAL = 1 / 20  # of it, into the correction


@dataclass(frozen=True)
class ExactDecentLaM(MomentumMethod):
    """u = lr g - y;  z = x - u - beta v;  x+ = W z
    v+ = beta v + u + (z - x+) / 2;  y+ = y - (z - x+) / 20

    y learns, from what mixing takes away, by how much lr g differs between the nodes, so that u is
    nearly the same on all of them. It is zero in the mean, which takes the steps of momentum SGD.
    docs/methods explains the two constants.
    """

    buffers = ("v", "y")
    balanced = ("y",)
    needs_symmetric = True

    def message(self, x, g, state, step):
        kept, now = self.beta * step.lr_ratio, 1.0
        if self.nesterov:
            kept, now = self.beta * kept, 1 + self.beta
        ahead = torch.sub(x, g, alpha=now * step.lr).sub_(state["v"], alpha=kept)
        return ahead.add_(state["y"], alpha=now * step.lr_ratio)

    def update(self, x, g, mixed, state, step):
        v, y, ratio = state["v"], state["y"], step.lr_ratio
        taken = self.message(x, g, state, step).sub_(mixed)
        v.mul_(self.beta * ratio).add_(g, alpha=step.lr).sub_(y, alpha=ratio)
        v.add_(taken, alpha=AT_ONCE)
        y.mul_(ratio).sub_(taken, alpha=INTEGRAL)
        x.copy_(mixed)
