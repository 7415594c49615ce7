"""AdamW by gossip: the gradient is preconditioned, then DecentLaM's steady momentum takes over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from decentlam.algorithms.base import Algorithm, State, Step, check_between, check_number, shown
from decentlam.algorithms.steady import SteadyDecentLaM

SecondMoment = Literal["slices", "local"]


@dataclass(frozen=True)
class Adam(Algorithm):
    """The hyper-parameters that AdamW and PmAdamW share."""

    beta: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    per_group: ClassVar[Mapping[str, str]] = {"eps": "eps"}
    decoupled_decay: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_between(self, **{"betas[0]": self.beta, "betas[1]": self.beta2})
        check_number(f"{type(self).__name__}: eps (1e-8 is usual)", self.eps)

    def hyper(self) -> dict[str, Any]:
        return {"betas": (self.beta, self.beta2), "eps": self.eps}

    def with_hyper(self, group: Mapping[str, Any]) -> Algorithm:
        beta, beta2 = check_betas(group["betas"]) if "betas" in group else (self.beta, self.beta2)
        eps = group.get("eps", self.eps)
        if (beta, beta2, eps) == (self.beta, self.beta2, self.eps):
            return self
        return replace(self, beta=beta, beta2=beta2, eps=eps)

    def second_moment_of(self, g: Tensor, before: Tensor, step: Step) -> Tensor:
        """Return the running mean of squared gradients; a gradient that is left out is no zero."""
        if step.skip:
            return before.clone()
        return before.mul(self.beta2).addcmul_(g, g, value=1 - self.beta2)

    def denominator(self, second: Tensor, t: int) -> Tensor:
        """Return sqrt of the second moment after t gradients, corrected for its start, plus eps."""
        return second.sqrt().div_(math.sqrt(1 - self.beta2**t)).add_(self.eps)


@dataclass(frozen=True)
class AdamW(Adam):
    """V = beta2 V + (1 - beta2) g^2;  p = g / (sqrt(V / (1 - beta2^t)) + eps)
    b = beta (1 - beta^(t-1)) / (1 - beta^t);  u = b v + lr (1 - b) p
    z = x - lr decay x - u;  x+ = W z;  s+ = mu s + (1 - mu) (z - x+)
    v+ = u + c (z - x+) + (1 - c) s+;  a seventeenth of V+ = W V

    The gradient is preconditioned before momentum (Ziyin et al., LaProp, 2020), so that what mixing
    moves enters the velocity as in `SteadyDecentLaM`, which has the same c and mu. V is shared in
    turns, on the same message: nodes with a V of their own converge to another point.
    """

    second_moment: SecondMoment = "slices"
    mu: float | None = None
    share: float | None = None
    buffers = ("v", "s", "exp_avg_sq")
    needs_symmetric = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_moment not in ("slices", "local"):
            raise ValueError(
                f"AdamW: second_moment must be 'slices' or 'local', got {shown(self.second_moment)}"
            )
        assert self.momentum  # which checks mu and share

    @cached_property
    def momentum(self) -> SteadyDecentLaM:
        """The recursion that the preconditioned gradient goes through."""
        return SteadyDecentLaM(self.beta, mu=self.mu, share=self.share)

    @property
    def averaged_state(self) -> str | None:  # type: ignore[override]
        return "exp_avg_sq" if self.second_moment == "slices" else None

    def steady(self) -> tuple[Algorithm, ...]:
        """Return the form with half the share, for networks so large that they mix slowly."""
        calmer = self.momentum.steady()
        return tuple(replace(self, mu=form.mu, share=form.share) for form in calmer)

    def linear(self) -> tuple[Algorithm, float]:
        return self.momentum, 1 - self.beta

    def message(self, x, g, state, step):
        taken, second = self._taken(g, state, step)
        ahead = _decayed(x, step).sub_(taken)
        return ahead if self.averaged_state is None else (ahead, second)

    def update(self, x, g, mixed, state, step):
        v, s, ratio = state["v"], state["s"], step.lr_ratio
        taken, second = self._taken(g, state, step)
        moved = _decayed(x, step).sub_(taken).sub_(mixed)
        if ratio != 1:
            s.mul_(ratio)
        s.lerp_(moved, 1 - self.momentum.filter)
        c = self.momentum.at_once
        v.copy_(taken).add_(s, alpha=1 - c).add_(moved, alpha=c)
        state["exp_avg_sq"].copy_(second)
        x.copy_(mixed)

    def _taken(self, g: Tensor, state: State, step: Step) -> tuple[Tensor, Tensor]:
        """Return u, what the step takes off x besides weight decay, and the new second moment."""
        second = self.second_moment_of(g, state["exp_avg_sq"], step)
        t = max(step.gradients, 1)
        kept = self.beta * (1 - self.beta ** (t - 1)) / (1 - self.beta**t)
        taken = torch.mul(g, (1 - kept) * step.lr).div_(self.denominator(second, t))
        return taken.add_(state["v"], alpha=kept * step.lr_ratio), second


def _decayed(x: Tensor, step: Step) -> Tensor:
    return torch.mul(x, 1 - step.lr * step.weight_decay)


def check_betas(betas: Any) -> tuple[float, float]:
    """Return the two coefficients, or refuse what is no pair of numbers."""
    if isinstance(betas, (tuple, list)) and len(betas) == 2:
        return betas[0], betas[1]
    raise ValueError(f"betas must be a pair such as (0.9, 0.999), got {shown(betas)}")
