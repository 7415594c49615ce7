"""GT-DmSGD: momentum along a gradient that the nodes track together (Xu et al., 2015)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.pmsgd import MomentumMethod, momentum


@dataclass(frozen=True)
class GTDmSGD(MomentumMethod):
    """y = c + g - g-;  m+ = beta m + y;  x+ = W (x - lr m+);  c+ = W y

    The mean of y over the nodes is always the mean gradient, and mixing makes the nodes' y alike.
    Gradients close a loop through y, which `decentlam.growth` sees when it is given lr and
    curvature: on one-peer-symmetric-exponential(8) lr times curvature may be 0.034 at most.
    """

    buffers = ("m", "c", "previous")
    balanced = ("c", "previous")

    def payloads(self, index):
        return 2

    def message(self, x, g, state, step):
        y = state["c"] + (g - state["previous"])
        h = momentum(y, state["m"], self.beta, self.nesterov)
        return torch.sub(x, h, alpha=step.lr), y

    def update(self, x, g, mixed, state, step):
        y = state["c"].add_(g - state["previous"])
        state["m"].mul_(self.beta).add_(y)
        state["previous"].copy_(g)
        x.copy_(mixed[0])
        state["c"].copy_(mixed[1])
