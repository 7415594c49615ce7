"""DA-DmSGD (Yu et al., 2019): the momentum is averaged too; two payloads, one round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.pmsgd import MomentumMethod


@dataclass(frozen=True)
class DADmSGD(MomentumMethod):
    """h = beta m + g;  x+ = W (x - lr h);  m+ = W h"""

    buffers = ("m",)

    def payloads(self, index: int) -> int:
        return 2

    def message(self, x, g, state, step):
        h = torch.add(g, state["m"], alpha=self.beta)
        direction = torch.add(g, h, alpha=self.beta) if self.nesterov else h
        return torch.sub(x, direction, alpha=step.lr), h

    def update(self, x, g, mixed, state, step):
        x.copy_(mixed[0])
        state["m"].copy_(mixed[1])
