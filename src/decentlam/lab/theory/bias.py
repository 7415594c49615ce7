"""How far from the optimum the methods end, as orders in lr, beta, rho and b^2."""

from __future__ import annotations

_MOMENTUM_POWER = {  # of 1/(1-beta) in the inconsistency bias
    "dsgd": 0,  # equation (38), after Yuan et al., 2020
    "dmsgd": 2,  # Proposition 2, equation (7)
    "da-dmsgd": 2,  # Table 2, after Yu et al., 2019; an upper bound, see `fixed_point`
    "awc-dmsgd": 2,  # Table 2, after Balu et al., 2020, with b for their gradient bound M
    "qg-dmsgd": 0,  # section 6.3, after Lin et al., 2021
    "decentlam": 0,  # Proposition 3, equation (18)
    "decentlam-steady": 0,  # the same fixed point
}
_UNBIASED = ("pmsgd", "d2-dmsgd", "decentlam-exact", "gt-dmsgd")


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
