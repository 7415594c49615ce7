"""Learning rates of the corollaries, by hand."""

from __future__ import annotations

import math

import pytest

from decentlam.lab import theory


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
def test_largest_momentum_is_where_the_condition_is_tight(rho: float):
    beta = theory.largest_momentum(rho)
    assert beta + 16 * beta**2 / ((1 - beta) * (1 - rho) ** 2) == pytest.approx((3 + rho) / 4)


def test_learning_rates_of_the_corollaries():
    assert theory.lr_nonconvex(n=4, steps=99, sigma=2.0, beta=0.5) == pytest.approx(0.05)
    # 2 * 0.5 * (2+1) * ln(4 * 100^2) / (2 * 1 * 100)
    expected = 3 * math.log(40_000) / 200
    assert theory.lr_strongly_convex(4, 100, L=2.0, mu=1.0, beta=0.5) == pytest.approx(expected)
