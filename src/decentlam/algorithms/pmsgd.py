"""The momentum of SGD, and PmSGD: momentum SGD on the exact average gradient, what DDP does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decentlam.algorithms.base import Algorithm, Reach, Step, check_between, check_number


def momentum(g: Tensor, m: Tensor, beta: float, nesterov: bool) -> Tensor:
    """Return the direction of momentum SGD: beta m + g, or g + beta (beta m + g) with Nesterov."""
    h = torch.add(g, m, alpha=beta)
    return torch.add(g, h, alpha=beta) if nesterov else h


def momentum_step_(x: Tensor, g: Tensor, m: Tensor, lr: float, beta: float, nesterov: bool) -> None:
    """Update m = beta m + g and x = x - lr m (or g + beta m with Nesterov), in place."""
    m.mul_(beta).add_(g)
    x.sub_(torch.add(g, m, alpha=beta) if nesterov else m, alpha=lr)


@dataclass(frozen=True)
class MomentumMethod(Algorithm):
    """A method with the momentum of SGD, which is what one node alone runs."""

    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta)

    def alone(self) -> Algorithm:
        return PmSGD(self.beta, self.nesterov)


@dataclass(frozen=True)
class PmSGD(MomentumMethod):
    """m+ = beta m + mean(g);  x+ = x - lr m+

    `lars` scales each layer's gradient by trust |x| / (|mean gradient| + weight_decay |x|)
    (You et al., 2017).
    """

    lars: bool = False
    trust: float = 0.001
    buffers = ("m",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("PmSGD: trust (0.001 is usual)", self.trust, above=True)

    @property
    def layerwise(self) -> bool:  # type: ignore[override]
        return self.lars

    def alone(self) -> Algorithm:
        return self

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
