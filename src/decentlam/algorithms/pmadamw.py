"""PmAdamW: AdamW on the exact average gradient, what DDP with torch.optim.AdamW does."""

from __future__ import annotations

from dataclasses import dataclass

from decentlam.algorithms.adamw import Adam
from decentlam.algorithms.base import Algorithm, Reach
from decentlam.algorithms.pmsgd import PmSGD


@dataclass(frozen=True)
class PmAdamW(Adam):
    """m+ = beta m + (1 - beta) mean(g);  V+ = beta2 V + (1 - beta2) mean(g)^2
    x+ = x - lr decay x - lr (m+ / (1 - beta^t)) / (sqrt(V+ / (1 - beta2^t)) + eps)
    """

    buffers = ("exp_avg", "exp_avg_sq")

    def reach(self, index: int) -> Reach:
        return Reach.EVERYONE

    def linear(self) -> tuple[Algorithm, float]:
        return PmSGD(self.beta), 1 - self.beta

    def message(self, x, g, state, step):
        return g

    def update(self, x, g, mixed, state, step):
        m, second = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(mixed, 1 - self.beta)
        second.mul_(self.beta2).addcmul_(mixed, mixed, value=1 - self.beta2)
        x.mul_(1 - step.lr * step.weight_decay)
        t = step.index + 1
        x.addcdiv_(m, self.denominator(second, t), value=-step.lr / (1 - self.beta**t))
