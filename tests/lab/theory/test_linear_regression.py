"""The paper's linear regression: its data, gradients and noise."""

from __future__ import annotations

import pytest
import torch

from decentlam.lab.theory.linear_regression import linear_regression


def test_regression_data_depends_on_the_seed_alone():
    first, again, other = (linear_regression(4, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first.A, again.A) and torch.equal(first.b, again.b)
    assert not torch.equal(first.b, other.b)
    at_optimum = first.gradient(first.x_star.expand_as(first.start))
    assert at_optimum.mean(0).norm() < 1e-12
    # The gradient is the textbook one, A'(A x - b).
    x = torch.ones_like(first.start)
    residual = first.A @ x.unsqueeze(2) - first.b.unsqueeze(2)
    torch.testing.assert_close(first.gradient(x), (first.A.mT @ residual).squeeze(2))


def test_heterogeneity_scales_b_and_nothing_else():
    problem = linear_regression(8, seed=3)
    scaled = problem.with_heterogeneity(10.0)
    torch.testing.assert_close(scaled.x_star, problem.x_star, rtol=1e-10, atol=1e-12)
    assert scaled.quadratic.b2 == pytest.approx(100 * problem.quadratic.b2, rel=1e-8)
    assert torch.equal(scaled.A, problem.A)


def test_noise_has_the_given_size_and_depends_on_seed_and_step():
    problem = linear_regression(4)
    noisy, x = problem.noisy(sigma=2.0, seed=5), problem.start
    noise = torch.stack([noisy(x, step) - problem.gradient(x) for step in range(2000)])
    assert noise.square().sum(2).mean().item() == pytest.approx(4.0, rel=0.02)
    assert torch.equal(noisy(x, 3), problem.noisy(2.0, 5)(x, 3))
    assert not torch.equal(noisy(x, 3), noisy(x, 4))
