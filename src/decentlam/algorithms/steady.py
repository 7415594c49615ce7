"""DecentLaM for weights that change: what mixing moves enters the momentum through a filter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decentlam.algorithms.base import Algorithm, check_between
from decentlam.algorithms.kernels import fused_step_, fusible
from decentlam.algorithms.pmsgd import PmSGD

_LEAST_LR = 1e-9  # of the fused kernel


@dataclass(frozen=True)
class SteadyDecentLaM(Algorithm):
    """z = x - lr g - beta v;  x+ = W z;  s+ = mu s + (1 - mu) (z - x+)
    v+ = beta v + lr g + c (z - x+) + (1 - c) s+

    v is the velocity of DmSGD, plus what mixing does to the model, as in DecentLaM: this removes
    the bias of momentum. Algorithm 2 feeds that back at once, and on changing weights its
    fluctuations are amplified without end. Here a share c passes at once and damps, the rest as
    its running mean. Mixing keeps the node average, so the average takes the very steps of
    momentum SGD. The fixed point on static weights is DecentLaM's. docs/stability.md derives
    c = 2 (1 - beta) and mu = 4 b / (1 + b)^2 with b = beta (1 - c).
    """

    beta: float = 0.9
    nesterov: bool = False
    mu: float | None = None
    share: float | None = None
    buffers = ("v", "s")
    reads_sent = True

    def __post_init__(self) -> None:
        check_between(self, momentum=self.beta)
        check_between(self, share=self.at_once)
        check_between(self, mu=self.filter)

    @property
    def at_once(self) -> float:
        """c, at most a half: for little momentum any share will do."""
        return min(2 * (1 - self.beta), 0.5) if self.share is None else self.share

    @property
    def filter(self) -> float:
        """mu; with exact averaging, the least for which disagreement dies out without swinging."""
        b = self.beta * (1 - self.at_once)
        return 4 * b / (1 + b) ** 2 if self.mu is None else self.mu

    @property
    def needs_symmetric(self) -> bool:
        return True

    @property
    def replaces_x(self) -> bool:
        return True

    def steady(self):
        """With half the share: for networks so large that they mix slowly."""
        return (replace(self, mu=None, share=self.at_once / 2),) if self.share is None else ()

    def alone(self):
        return PmSGD(self.beta, self.nesterov)

    def message(self, x, g, state, step):
        kept = self.beta * step.lr_ratio
        if self.nesterov:
            ahead = torch.sub(x, g, alpha=(1 + self.beta) * step.lr, out=step.out)
            return ahead.sub_(state["v"], alpha=self.beta * kept)
        return torch.sub(x, g, alpha=step.lr, out=step.out).sub_(state["v"], alpha=kept)

    def update(self, x, g, mixed, state, step):
        v, s = state["v"], state["s"]
        kept, c, mu = self.beta * step.lr_ratio, self.at_once, self.filter
        if step.lr_ratio != 1:
            s.mul_(step.lr_ratio)
        sent = self.message(x, g, state, step) if step.sent is None else step.sent
        taken = torch.sub(sent, mixed, out=step.out)
        # 1 - (1 - lr) is not lr to the last digit of a float64, of little use for a tiny lr, and on
        # a GPU, where the kernel takes its coefficients as float32, already for a small one.
        fast = x.dtype is torch.float32 and x.device.type == "cpu" and step.lr > _LEAST_LR
        fast = fast and kept > 0 and mu > 0 and not self.nesterov
        if fast and fusible(taken, g, v, s):
            # Weight decay c / lr of `taken`, which a rate of 0 leaves as it is.
            decay, dampening = c / step.lr, 1 - step.lr
            fused_step_(taken, g, v, lr=0.0, momentum=kept, weight_decay=decay, dampening=dampening)
            fused_step_(v, taken, s, lr=c - 1, momentum=mu, dampening=mu)
        else:
            v.mul_(kept).add_(g, alpha=step.lr)
            s.lerp_(taken, 1 - mu)
            # Nesterov sends beta v: only 1/beta of this then cancels the local gradient in the end.
            weight = 1 / self.beta if self.nesterov and self.beta else 1.0
            v.add_(s, alpha=weight * (1 - c)).add_(taken, alpha=weight * c)
        x.copy_(mixed)
