"""DA-DmSGD (Yu et al., 2019): the momentum is averaged too; two payloads, one round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.base import Algorithm, check_between
from decentlam.algorithms.pmsgd import PmSGD


@dataclass(frozen=True)
class DADmSGD(Algorithm):
    """h = beta m + g;  x+ = W (x - lr h);  m+ = W h"""

    beta: float = 0.9
    nesterov: bool = False
    buffers = ("m",)

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta)

    def payloads(self, index: int) -> int:
        return 2

    def alone(self):
        return PmSGD(self.beta, self.nesterov)

    def message(self, x, g, state, step):
        h = torch.add(g, state["m"], alpha=self.beta)
        direction = torch.add(g, h, alpha=self.beta) if self.nesterov else h
        return torch.sub(x, direction, alpha=step.lr), h

    def update(self, x, g, mixed, state, step):
        x.copy_(mixed[0])
        state["m"].copy_(mixed[1])
