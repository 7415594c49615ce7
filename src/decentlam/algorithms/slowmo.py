"""SlowMo (Wang et al., 2020): every tau steps an exact average and a step of slow momentum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.algorithms.base import Reach, check_between, check_count, check_number
from decentlam.algorithms.pmsgd import MomentumMethod, momentum

_BASES = ("dmsgd", "local")
_INNER = ("keep", "reset", "average")


@dataclass(frozen=True)
class SlowMo(MomentumMethod):
    """tau DmSGD steps from x0, their exact average a;  u+ = slow_beta u + (x0 - a) / lr;
    x = x0 - alpha lr u+

    Kept in velocity form w = lr u. Mixing keeps the average, so the last inner step and the exact
    average are one round. `inner_momentum`: m is kept, reset or averaged in a second payload.
    """

    tau: int = 48
    slow_beta: float = 0.5
    alpha: float = 1.0
    base: str = "dmsgd"
    inner_momentum: str = "keep"
    buffers = ("m", "w", "x0")  # x0: where the period began

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between(self, slow_beta=self.slow_beta)
        check_count("SlowMo: tau", self.tau)
        check_number("SlowMo: alpha (1 is usual)", self.alpha, above=True)
        if self.base not in _BASES:
            raise ValueError(f"SlowMo: unknown base {self.base!r}; choose from {', '.join(_BASES)}")
        if self.inner_momentum not in _INNER:
            raise ValueError(
                f"SlowMo: unknown inner_momentum {self.inner_momentum!r}; "
                f"choose from {', '.join(_INNER)}"
            )

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.tau

    def init(self, x):
        return {"m": torch.zeros_like(x), "w": torch.zeros_like(x), "x0": x.clone()}

    def reach(self, index: int) -> Reach:
        if self._ends(index):
            return Reach.EVERYONE
        return Reach.NOBODY if self.base == "local" else Reach.NEIGHBORS

    def payloads(self, index: int) -> int:
        return 2 if self._ends(index) and self.inner_momentum == "average" else 1

    def message(self, x, g, state, step):
        z = torch.sub(x, momentum(g, state["m"], self.beta, self.nesterov), alpha=step.lr)
        if self.payloads(step.index) == 2:
            return z, torch.add(g, state["m"], alpha=self.beta)
        return z

    def update(self, x, g, mixed, state, step):
        m, w, x0 = state["m"], state["w"], state["x0"]
        if step.index % self.tau == 0:
            x0.copy_(x)
        m.mul_(self.beta).add_(g)
        if not self._ends(step.index):
            x.copy_(mixed)
            return
        a = mixed
        if self.inner_momentum == "average":
            a = mixed[0]
            m.copy_(mixed[1])
        elif self.inner_momentum == "reset":
            m.zero_()
        w.mul_(self.slow_beta * step.sync_lr_ratio).add_(x0 - a)
        torch.sub(x0, w, alpha=self.alpha, out=x)

    def _ends(self, index: int) -> bool:
        return (index + 1) % self.tau == 0
