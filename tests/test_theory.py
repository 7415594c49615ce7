"""What the paper predicts, against hand computation and against the simulator."""

from __future__ import annotations

import math

import pytest
import torch

from decentlam import simulate
from decentlam.lab import theory
from decentlam.lab.problems import linear_regression
from decentlam.topology import (
    Topology,
    bipartite_random_match,
    exponential,
    from_weights,
    mesh,
    ring,
)

LIMITS = [
    ("pmsgd", {}),
    ("dsgd", {}),
    ("dmsgd", {}),
    ("da-dmsgd", {}),
    ("awc-dmsgd", {}),
    ("awc-dmsgd", {"heavy_ball": True}),
    ("qg-dmsgd", {}),
    ("d2-dmsgd", {}),
    ("decentlam", {}),
    ("decentlam-steady", {}),
    ("gt-dmsgd", {}),
    ("slowmo", {"tau": 6}),
    ("slowmo", {"tau": 6, "inner_momentum": "average"}),
    ("slowmo", {"tau": 6, "inner_momentum": "reset", "base": "local"}),
]


@pytest.mark.parametrize("network", [mesh(8), ring(8)], ids=repr)
@pytest.mark.parametrize(("method", "hyper"), LIMITS, ids=str)
def test_the_closed_form_is_where_the_simulation_ends(method: str, hyper: dict, network: Topology):
    problem = linear_regression(8, rows=50, dim=5, seed=1)
    q = problem.quadratic
    predicted = theory.fixed_point(method, network, q.hessians, q.linear, 0.001, 0.8, **hyper)
    reached = simulate(
        method, network, problem.start, problem.gradient, 0.001, 1800, momentum=0.8, **hyper
    )
    offset = (predicted - q.x_star).norm()
    assert (offset == 0) == (method in ("pmsgd", "d2-dmsgd", "gt-dmsgd"))
    # Eight digits of the distance from x*, or round-off where there is none.
    assert (reached - predicted).norm() <= max(1e-8 * offset, 1e-12)


def test_two_nodes_by_hand():
    # f_i = (x - c_i)^2 / 2 with c = (1, -1), so x* = 0 and x = (a, -a). With
    # W = [[3/4, 1/4], [1/4, 3/4]], (I - W) x = a/2 and W grad f(x) = (a - 1)/2 on the first node:
    # dsgd       a/2 = -lr (a - 1)/2                          a = lr / (1 + lr)
    # dmsgd      (1 - beta) a/2 = -lr (a - 1)/2               a = lr / (1 - beta + lr)
    # da-dmsgd   a/2 = -lr (a - 1)/2 / (1 - beta/2)           a = lr / (1 - beta/2 + lr)
    # awc-dmsgd  (1 - beta) a/2 = -lr (a - 1)                 a = 2 lr / (1 - beta + 2 lr)
    network = from_weights([[0.75, 0.25], [0.25, 0.75]])
    hessians, linear = torch.ones(2, 1, 1), torch.tensor([[1.0], [-1.0]])
    lr, beta = 0.1, 0.6
    by_hand = {
        "dsgd": lr / (1 + lr),
        "decentlam": lr / (1 + lr),
        "decentlam-steady": lr / (1 + lr),
        "qg-dmsgd": lr / (1 + lr),
        "dmsgd": lr / (1 - beta + lr),
        "da-dmsgd": lr / (1 - beta / 2 + lr),
        "awc-dmsgd": 2 * lr / (1 - beta + 2 * lr),
        "d2-dmsgd": 0.0,
        "gt-dmsgd": 0.0,
        "pmsgd": 0.0,
    }
    for method, a in by_hand.items():
        x = theory.fixed_point(method, network, hessians, linear, lr, beta)
        assert x.flatten().tolist() == pytest.approx([a, -a], abs=1e-15), method


@pytest.mark.parametrize("method", ["dsgd", "dmsgd", "da-dmsgd", "awc-dmsgd", "decentlam"])
def test_the_closed_form_stays_accurate_as_lr_vanishes(method: str):
    problem = linear_regression(8, rows=50, dim=5)
    q = problem.quadratic
    leading = theory.leading_bias(method, mesh(8), q.hessians, q.linear, 0.8)
    x = theory.fixed_point(method, mesh(8), q.hessians, q.linear, 1e-8, 0.8)
    # 1e-8 * (x - x*) keeps eight of x*'s sixteen digits, and the expansion's next term is 1e-6.
    assert problem.bias(x) == pytest.approx(1e-16 * leading, rel=1e-5)


def test_momentum_amplifies_the_leading_bias_of_dmsgd_and_not_of_decentlam():
    q = linear_regression(8, rows=50, dim=5).quadratic
    bias = {
        (method, beta): theory.leading_bias(method, mesh(8), q.hessians, q.linear, beta)
        for method in ("dmsgd", "awc-dmsgd", "decentlam")
        for beta in (0.0, 0.9)
    }
    assert bias["dmsgd", 0.9] / bias["dmsgd", 0.0] == pytest.approx(100)
    assert bias["awc-dmsgd", 0.9] / bias["awc-dmsgd", 0.0] == pytest.approx(100)
    assert bias["decentlam", 0.9] == bias["decentlam", 0.0] == pytest.approx(bias["dmsgd", 0.0])


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


def test_theorem_1_by_hand():
    # beta = 1/2, rho = 1/4, L = 2: the numerators are (1-beta)^2 = 1/4 and 1-rho = 3/4.
    size = theory.step_size_nonconvex(L=2.0, beta=0.5, rho=0.25)
    expected = [0.25 / (10 * math.sqrt(0.75)), 0.25 / 10, 0.25 / 6, 0.75 / 20]
    assert list(size.terms.values()) == pytest.approx(expected)
    assert size.lr == pytest.approx(0.025)
    assert size.binding == "(1-beta)^2 / ((5-beta+2 beta^2) L)"
    # 1/2 + 16/4 / (1/2 * 9/16) = 14.7 is above (3+rho)/4, and W was not given.
    assert [condition.holds for condition in size.conditions] == [False, None]
    assert not size.covered


def test_theorem_1_covers_plain_gradients_on_a_positive_definite_network():
    network = ring(8).lazy(0.5)
    size = theory.step_size_nonconvex(1.0, 0.0, network.rho, network.positive_definite)
    assert size.covered
    assert size.lr == (1 - network.rho) / (20 * math.sqrt(network.rho))


def test_theorem_2_scales_with_the_problem():
    # Twice the function, half the step: true of the proof's third term, not of the printed one.
    size = theory.step_size_strongly_convex(L=4.0, mu=1.0, beta=0.1, rho=0.9)
    twice = theory.step_size_strongly_convex(L=8.0, mu=2.0, beta=0.1, rho=0.9)
    assert size.binding == "(1-rho) / (sqrt(1728 (kappa+1)) L)"
    assert size.lr == pytest.approx(0.1 / (math.sqrt(1728 * 5) * 4))
    assert twice.lr == pytest.approx(size.lr / 2)
    assert {name: value / 2 for name, value in size.terms.items()} == pytest.approx(twice.terms)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
def test_largest_momentum_is_where_the_condition_is_tight(rho: float):
    beta = theory.largest_momentum(rho)
    assert beta + 16 * beta**2 / ((1 - beta) * (1 - rho) ** 2) == pytest.approx((3 + rho) / 4)


def test_learning_rates_of_the_corollaries():
    assert theory.lr_nonconvex(n=4, steps=99, sigma=2.0, beta=0.5) == pytest.approx(0.05)
    # 2 * 0.5 * (2+1) * ln(4 * 100^2) / (2 * 1 * 100)
    expected = 3 * math.log(40_000) / 200
    assert theory.lr_strongly_convex(4, 100, L=2.0, mu=1.0, beta=0.5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "network", "reason"),
    [
        ("nope", ring(4), "unknown method 'nope'; choose from awc-dmsgd"),
        ("pmsgd-lars", ring(4), "no fixed point: LARS"),
        ("dmsgd", bipartite_random_match(4), "changes with the step"),
        ("decentlam", exponential(4), "needs symmetric weights"),
        ("dmsgd", ring(5), "has 5 nodes, but there are 4 functions"),
    ],
    ids=str,
)
def test_what_has_no_fixed_point_is_refused(method: str, network: Topology, reason: str):
    with pytest.raises(ValueError, match=reason):
        theory.fixed_point(method, network, torch.ones(4, 1, 1), torch.ones(4, 1), 0.1)


def test_constants_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1"):
        theory.step_size_nonconvex(1.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="mu must not exceed L"):
        theory.step_size_strongly_convex(L=1.0, mu=2.0, beta=0.5, rho=0.5)
    with pytest.raises(ValueError, match=r"hessians must be \(n, d, d\)"):
        theory.Quadratic(torch.ones(4, 2, 3), torch.ones(4, 2))
