"""Step sizes of the theorems and corollaries, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from decentlam.lab import theory
from decentlam.topology import (
    ring,
)


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


def test_constants_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1"):
        theory.step_size_nonconvex(1.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="mu must not exceed L"):
        theory.step_size_strongly_convex(L=1.0, mu=2.0, beta=0.5, rho=0.5)
    with pytest.raises(ValueError, match=r"hessians must be \(n, d, d\)"):
        theory.Quadratic(torch.ones(4, 2, 3), torch.ones(4, 2))
