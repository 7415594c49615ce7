"""Step sizes of Theorems 1 and 2 and Corollaries 1 and 2: how large, and what limits them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Condition:
    """A requirement of a theorem; `holds` is None where it could not be checked."""

    requirement: str
    holds: bool | None


@dataclass(frozen=True)
class StepSize:
    """The largest learning rate a theorem covers, and everything it asks for."""

    lr: float
    binding: str  # the smallest of `terms`
    terms: dict[str, float]
    conditions: tuple[Condition, ...]
    source: str

    @property
    def covered(self) -> bool:
        """Whether every condition is known to hold, so that the theorem speaks of this case."""
        return all(condition.holds for condition in self.conditions)


def step_size_nonconvex(
    L: float, beta: float, rho: float, positive_definite: bool | None = None
) -> StepSize:
    """Return Theorem 1's (non-convex) largest lr for which DecentLaM converges as (19).

    L is the smoothness of every f_i. rho and positive_definite are the topology's.

    >>> step_size_nonconvex(L=1.0, beta=0.9, rho=0.8).binding
    '(1-beta)^2 / (12 L beta^2)'
    """
    _check(beta=beta, rho=rho, L=L)
    terms = {
        "(1-beta)^2 / (5 sqrt(beta+beta^2) L)": _ratio(
            (1 - beta) ** 2, 5 * math.sqrt(beta + beta**2) * L
        ),
        "(1-beta)^2 / ((5-beta+2 beta^2) L)": (1 - beta) ** 2 / ((5 - beta + 2 * beta**2) * L),
        "(1-beta)^2 / (12 L beta^2)": _ratio((1 - beta) ** 2, 12 * L * beta**2),
        "(1-rho) / (20 sqrt(rho) L)": _ratio(1 - rho, 20 * math.sqrt(rho) * L),
    }
    return _smallest(terms, beta, rho, positive_definite, "Theorem 1")


def step_size_strongly_convex(
    L: float, mu: float, beta: float, rho: float, positive_definite: bool | None = None
) -> StepSize:
    """Return Theorem 2's (strongly convex) largest lr for which DecentLaM converges as (20).

    The third term is printed in the main text without L, (1-rho) / sqrt(1728 (kappa+1)). The proof
    needs 4 L (kappa+1) 216 L lr^2 / (1-rho)^2 <= 1/2, and lr must scale as 1/L, so the proof's
    (1-rho) / (sqrt(1728 (kappa+1)) L) is used. The second term is the same in both places:
    (L+mu) / (L mu) = (kappa+1) / L.
    """
    _check(beta=beta, rho=rho, L=L, mu=mu)
    if mu > L:
        raise ValueError(f"mu must not exceed L, got mu = {mu:g} and L = {L:g}; try swapping them")
    kappa = L / mu
    terms = {
        "(1-beta)^2 / (27 L)": (1 - beta) ** 2 / (27 * L),
        "(1-rho) (1-beta) (kappa+1) / (5 L)": (1 - rho) * (1 - beta) * (kappa + 1) / (5 * L),
        "(1-rho) / (sqrt(1728 (kappa+1)) L)": (1 - rho) / (math.sqrt(1728 * (kappa + 1)) * L),
    }
    return _smallest(terms, beta, rho, positive_definite, "Theorem 2, third term as in its proof")


def largest_momentum(rho: float) -> float:
    """Return the largest beta with beta + 16 beta^2 / ((1-beta)(1-rho)^2) <= (3+rho)/4.

    Both theorems ask for this. It is small: the paper calls it an aid to the analysis that its
    experiments, with beta = 0.9, do not respect.

    >>> round(largest_momentum(0.0), 3), round(largest_momentum(0.8), 3)
    (0.173, 0.046)
    """
    _check(rho=rho)
    # (1-beta) times the condition is (c-1) beta^2 + (1+d) beta - d <= 0 with c, d as below.
    c, d = 16 / (1 - rho) ** 2, (3 + rho) / 4
    return (math.sqrt((1 + d) ** 2 + 4 * (c - 1) * d) - (1 + d)) / (2 * (c - 1))


def lr_nonconvex(n: int, steps: int, sigma: float, beta: float) -> float:
    """Return Corollary 1's lr = (1-beta) sqrt(n) / (sigma sqrt(steps+1)): rate 1/sqrt(n steps)."""
    _check(beta=beta, n=n, steps=steps, sigma=sigma)
    return (1 - beta) * math.sqrt(n / (steps + 1)) / sigma


def lr_strongly_convex(n: int, steps: int, L: float, mu: float, beta: float) -> float:
    """Return Corollary 2's lr = 2 (1-beta)(L+mu) ln(n steps^2) / (L mu steps).

    The rate is 1/(n steps), up to the logarithm.
    """
    _check(beta=beta, n=n, steps=steps, L=L, mu=mu)
    return 2 * (1 - beta) * (L + mu) * math.log(n * steps**2) / (L * mu * steps)


def _smallest(
    terms: dict[str, float], beta: float, rho: float, positive_definite: bool | None, source: str
) -> StepSize:
    small_momentum = Condition(
        "beta + 16 beta^2 / ((1-beta)(1-rho)^2) <= (3+rho)/4, here beta <= "
        f"{largest_momentum(rho):.3g}",
        beta + 16 * beta**2 / ((1 - beta) * (1 - rho) ** 2) <= (3 + rho) / 4,
    )
    definite = Condition("W is positive definite", positive_definite)
    binding = min(terms, key=terms.__getitem__)
    return StepSize(terms[binding], binding, terms, (small_momentum, definite), source)


def _ratio(above: float, below: float) -> float:
    """Return the ratio, or infinity when beta or rho is 0: the term vanishes from the minimum."""
    return above / below if below else math.inf


def _check(**values: float) -> None:
    for name, value in values.items():
        if name in ("beta", "rho"):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}")
        elif not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value!r}")
