"""Learning rates of Corollaries 1 and 2, and the momentum that the theorems ask for."""

from __future__ import annotations

import math


def largest_momentum(rho: float) -> float:
    """Return the largest beta with beta + 16 beta^2 / ((1-beta)(1-rho)^2) <= (3+rho)/4.

    Theorems 1 and 2 ask for this. It is small: the paper calls it an aid to the analysis that its
    experiments, with beta = 0.9, do not respect.

    >>> round(largest_momentum(0.0), 3), round(largest_momentum(0.8), 3)
    (0.173, 0.046)
    """
    # (1-beta) times the condition is (c-1) beta^2 + (1+d) beta - d <= 0 with c, d as below.
    c, d = 16 / (1 - rho) ** 2, (3 + rho) / 4
    return (math.sqrt((1 + d) ** 2 + 4 * (c - 1) * d) - (1 + d)) / (2 * (c - 1))


def lr_nonconvex(n: int, steps: int, sigma: float, beta: float) -> float:
    """Return Corollary 1's lr = (1-beta) sqrt(n) / (sigma sqrt(steps+1)): rate 1/sqrt(n steps)."""
    return (1 - beta) * math.sqrt(n / (steps + 1)) / sigma


def lr_strongly_convex(n: int, steps: int, L: float, mu: float, beta: float) -> float:
    """Return Corollary 2's lr = 2 (1-beta)(L+mu) ln(n steps^2) / (L mu steps).

    The rate is 1/(n steps), up to the logarithm.
    """
    return 2 * (1 - beta) * (L + mu) * math.log(n * steps**2) / (L * mu * steps)
