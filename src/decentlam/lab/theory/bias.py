"""How far from the optimum the methods end, as orders in lr, beta, rho, b^2 and sigma^2."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOMENTUM_POWER = {  # of 1/(1-beta) in the inconsistency bias
    "dsgd": 0,  # equation (38), after Yuan et al., 2020
    "dmsgd": 2,  # Proposition 2, equation (7)
    "da-dmsgd": 2,  # Table 2, after Yu et al., 2019; an upper bound, see `fixed_point`
    "awc-dmsgd": 2,  # Table 2, after Balu et al., 2020, with b for their gradient bound M
    "qg-dmsgd": 0,  # section 6.3, after Lin et al., 2021
    "decentlam": 0,  # Proposition 3, equation (18)
    "decentlam-steady": 0,  # the same fixed point
}
_UNBIASED = ("pmsgd", "d2-dmsgd", "gt-dmsgd")


@dataclass(frozen=True)
class StochasticBias:
    """The two noise terms of (19) and (20): what averaging leaves, and what the network adds."""

    averaged: float  # lr sigma^2 / (n (1-beta)): shared by all nodes, shrinks with n
    network: float  # lr^2 sigma^2 / (1-rho): the nodes' disagreement

    @property
    def total(self) -> float:
        return self.averaged + self.network


def inconsistency_bias(method: str, lr: float, beta: float, rho: float, b2: float) -> float:
    """Return the order of (1/n) sum |x_i - x*|^2 in the limit of full gradients, constant 1.

        lr^2 b2 / (1-rho)^2                  dsgd (38), decentlam (18), qg-dmsgd
        lr^2 b2 / ((1-beta)^2 (1-rho)^2)     dmsgd (7), da-dmsgd, awc-dmsgd (Table 2)
        0                                    pmsgd, d2-dmsgd

    b2 = (1/n) sum |grad f_i(x*)|^2. The law holds as lr -> 0; `fixed_point` is exact at any lr.

    >>> round(inconsistency_bias("dmsgd", 0.01, 0.9, 0.5, 1.0)
    ...       / inconsistency_bias("decentlam", 0.01, 0.9, 0.5, 1.0))
    100
    """
    if method in _UNBIASED:
        return 0.0
    power = momentum_power(method)
    return lr**2 * b2 / ((1 - beta) ** power * (1 - rho) ** 2)


def momentum_power(method: str) -> int:
    """Return the power of 1/(1-beta) in the method's inconsistency bias."""
    if method not in _MOMENTUM_POWER:
        raise ValueError(
            f"the paper gives no order for the inconsistency bias of {method!r}; it does for "
            f"{', '.join(sorted([*_MOMENTUM_POWER, *_UNBIASED]))}. On quadratics try fixed_point."
        )
    return _MOMENTUM_POWER[method]


def inconsistency_bound(
    method: str, lr: float, beta: float, rho: float, b2: float, L: float, mu: float
) -> float:
    """Return an upper bound of (1/n) sum |x_i - x*|^2, constants as in Proposition 2's proof.

        ((1 + 2 L/mu) 2 lr b / ((1-beta)(1-rho)))^2    if lr <= mu (1-beta)(1-rho) / (6 L^2)

    Proposition 3's proof is the same without 1-beta. Larger lr are refused.
    """
    if method not in ("dsgd", "dmsgd", "decentlam"):
        raise ValueError(
            "the paper proves a bound with constants for dsgd, dmsgd and decentlam, not for "
            f"{method!r}; on quadratics try fixed_point"
        )
    slack = (1 - rho) * (1 - beta if momentum_power(method) else 1.0)
    largest = mu * slack / (6 * L**2)
    if lr > largest:
        raise ValueError(
            f"the bound for {method} holds for lr <= mu (1-beta)(1-rho) / (6 L^2) = {largest:.3g}, "
            f"got {lr:g}; on quadratics fixed_point is exact at any lr"
        )
    return ((1 + 2 * L / mu) * 2 * lr * math.sqrt(b2) / slack) ** 2


def stochastic_bias(
    method: str, lr: float, beta: float, rho: float, sigma2: float, n: int
) -> StochasticBias:
    """Return the orders of the stochastic bias: (38) for dsgd, (19) and (20) for decentlam.

    lr sigma2 / (n (1-beta))  +  lr^2 sigma2 / (1-rho)        beta = 0 for dsgd
    """
    if method not in ("dsgd", "decentlam"):
        raise ValueError(
            f"the paper gives the stochastic bias of dsgd and decentlam, not of {method!r}"
        )
    momentum = beta if method == "decentlam" else 0.0
    return StochasticBias(lr * sigma2 / (n * (1 - momentum)), lr**2 * sigma2 / (1 - rho))
