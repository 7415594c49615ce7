"""Fixed points in closed form, against hand computation and the simulator; the paper's problem."""

from __future__ import annotations

import pytest
import torch

from decentlam import simulate
from decentlam.lab.theory import COUPLINGS, Quadratic, fixed_point, linear_regression
from decentlam.topology import Topology, bipartite_random_match, from_weights, mesh, ring

UNBIASED = ("pmsgd", "d2-dmsgd", "gt-dmsgd", "decentlam-exact")


@pytest.mark.parametrize("network", [mesh(8), ring(8)], ids=repr)
@pytest.mark.parametrize("method", [m for m in COUPLINGS if m != "decentlam-exact"])
def test_the_closed_form_is_where_the_simulation_ends(method: str, network: Topology):
    problem = linear_regression(8, rows=50, dim=5, seed=1)
    predicted = fixed_point(method, network, problem, 0.001, 0.8)
    reached = simulate(method, network, problem.start, problem.gradient, 0.001, 1800, momentum=0.8)
    offset = (predicted - problem.x_star).norm()
    assert (offset == 0) == (method in UNBIASED)
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
    problem = Quadratic(torch.ones(2, 1, 1), torch.tensor([[1.0], [-1.0]]))
    lr, beta = 0.1, 0.6
    by_hand = {
        "dsgd": lr / (1 + lr),
        "decentlam": lr / (1 + lr),
        "decentlam-steady": lr / (1 + lr),
        "qg-dmsgd": lr / (1 + lr),
        "dmsgd": lr / (1 - beta + lr),
        "da-dmsgd": lr / (1 - beta / 2 + lr),
        "awc-dmsgd": 2 * lr / (1 - beta + 2 * lr),
        **dict.fromkeys(UNBIASED, 0.0),
    }
    assert by_hand.keys() == COUPLINGS.keys()
    for method, a in by_hand.items():
        x = fixed_point(method, network, problem, lr, beta)
        assert x.flatten().tolist() == pytest.approx([a, -a], abs=1e-15), method


@pytest.mark.parametrize(
    ("method", "network", "reason"),
    [
        ("slowmo", ring(4), "'slowmo' has no fixed point in closed form; choose from pmsgd"),
        ("dmsgd", bipartite_random_match(4), "changes with the step"),
    ],
    ids=str,
)
def test_what_has_no_fixed_point_is_refused(method: str, network: Topology, reason: str):
    with pytest.raises(ValueError, match=reason):
        fixed_point(method, network, Quadratic(torch.ones(4, 1, 1), torch.ones(4, 1)), 0.1)


def test_the_problem_depends_on_the_seed_alone_and_its_heterogeneity_can_be_scaled():
    first, again, other = (linear_regression(8, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first.linear, again.linear) and not torch.equal(first.linear, other.linear)
    assert first.gradient(first.x_star.expand_as(first.start)).mean(0).norm() < 1e-12
    scaled = first.with_heterogeneity(10.0)
    torch.testing.assert_close(scaled.x_star, first.x_star, rtol=1e-10, atol=1e-12)
    assert scaled.b2 == pytest.approx(100 * first.b2, rel=1e-8)
