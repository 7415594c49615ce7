"""PmSGD: momentum SGD on the exact average gradient, what DDP does; LARS on top if asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decentlam.algorithms.base import Algorithm, Reach, Step, check_between, check_number
from decentlam.algorithms.momentum import momentum_step_


@dataclass(frozen=True)
class PmSGD(Algorithm):
    """m+ = beta m + mean(g);  x+ = x - lr m+

    `lars` scales each layer's gradient by trust |x| / (|mean gradient| + weight_decay |x|)
    (You et al., 2017).
    """

    beta: float = 0.9
    nesterov: bool = False
    lars: bool = False
    trust: float = 0.001
    buffers = ("m",)

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta)
        check_number("PmSGD: trust (0.001 is usual)", self.trust, above=True)

    @property
    def layerwise(self) -> bool:
        return self.lars

    def reach(self, index: int) -> Reach:
        return Reach.EVERYONE

    def message(self, x, g, state, step):
        return g

    def update(self, x, g, mixed, state, step):
        if self.lars and step.adaptive:
            mixed = mixed * self._layer_rate(x, mixed, step)
        momentum_step_(x, mixed, state["m"], step.lr, self.beta, self.nesterov)

    def _layer_rate(self, x: Tensor, g: Tensor, step: Step) -> Tensor:
        size = step.norm(x)
        slope = step.norm(g - step.weight_decay * x)
        rate = self.trust * size / (slope + step.weight_decay * size)
        return torch.where((size > 0) & (slope > 0), rate, torch.ones_like(rate))
