"""The orders and bounds of the bias."""

from __future__ import annotations

import pytest

from decentlam.lab import theory
from decentlam.lab.theory.linear_regression import linear_regression
from decentlam.topology import (
    ring,
)


@pytest.mark.parametrize("method", ["dsgd", "dmsgd", "decentlam"])
def test_the_bias_lies_below_the_bound_of_proposition_2s_proof(method: str):
    problem = linear_regression(8, rows=50, dim=5)
    q, network, beta = problem.quadratic, ring(8), 0.8
    largest = q.mu * (1 - network.rho) / (6 * q.L**2) * (1 - beta if method == "dmsgd" else 1)
    constants = {"beta": beta, "rho": network.rho, "b2": q.b2, "L": q.L, "mu": q.mu}
    for lr in (0.1 * largest, 0.999 * largest):
        x = theory.fixed_point(method, network, q.hessians, q.linear, lr, beta)
        assert problem.bias(x) <= theory.inconsistency_bound(method, lr, **constants)
    with pytest.raises(ValueError, match="holds for lr <="):
        theory.inconsistency_bound(method, 1.01 * largest, **constants)


def test_orders_of_the_inconsistency_bias():
    # lr^2 b2 / (1-rho)^2 = 0.01 * 3 / 0.25 = 0.12, and 1/(1-beta)^2 = 25 times as much.
    at = {"lr": 0.1, "beta": 0.8, "rho": 0.5, "b2": 3.0}
    for method in ("dsgd", "decentlam", "qg-dmsgd"):
        assert theory.inconsistency_bias(method, **at) == pytest.approx(0.12)
    for method in ("dmsgd", "da-dmsgd", "awc-dmsgd"):
        assert theory.inconsistency_bias(method, **at) == pytest.approx(3.0)
    assert theory.inconsistency_bias("d2-dmsgd", **at) == 0
    with pytest.raises(ValueError, match="no order for the inconsistency bias of 'slowmo'"):
        theory.inconsistency_bias("slowmo", **at)


def test_stochastic_bias_has_a_term_that_falls_with_n_and_one_that_does_not():
    # lr sigma2 / (n (1-beta)) = 0.1 * 2 / (4 * 0.5), lr^2 sigma2 / (1-rho) = 0.01 * 2 / 0.25
    bias = theory.stochastic_bias("decentlam", 0.1, beta=0.5, rho=0.75, sigma2=2.0, n=4)
    assert (bias.averaged, bias.network) == pytest.approx((0.1, 0.08))
    assert bias.total == pytest.approx(0.18)
    assert theory.stochastic_bias("dsgd", 0.1, 0.5, 0.75, 2.0, 4).averaged == pytest.approx(0.05)
