"""Eigenvalues and mixing rates are those of the dense matrices, or of long runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decentlam import topology
from decentlam.topology import TOPOLOGIES, SparseWeights, Topology, from_weights
from tests.helpers.networks import every_periodic_topology, networks


@every_periodic_topology
def test_rho_is_what_one_step_keeps_of_the_disagreement(name: str) -> None:
    for net in networks(name):
        assert net.period is not None
        keeps = np.eye(net.num_nodes) - 1 / net.num_nodes
        for k in range(net.period):
            keeps = net.weights(k).numpy() @ keeps
        if net.static and not net.symmetric:
            expected = np.linalg.norm(keeps, 2)
        else:
            expected = np.abs(np.linalg.eigvals(keeps)).max() ** (1 / net.period)
        # A defective zero eigenvalue comes out of numpy as 1e-16, whose root is not small, and a
        # long period leaves less than that of any disagreement: the next test has those.
        if expected**net.period > 1e-12:
            assert net.rho == pytest.approx(expected, abs=1e-9)
        elif net.period < 40:
            assert net.rho == 0
        assert 0 <= net.rho < 1


def test_rho_of_a_long_period_is_the_decay_of_a_long_run() -> None:
    """132 steps leave less than 1e-20 of the disagreement, and yet never average exactly."""
    net = topology.one_peer_symmetric_exponential(33)
    assert net.period is not None and net.exact_after is None
    x = np.random.default_rng(0).standard_normal(33)
    periods, logs = 20, 0.0
    for period in range(periods + 1):  # the first one only forgets the start
        for k in range(net.period):
            x = net.weights(k).numpy() @ x
            x -= x.mean()
        logs += math.log(np.linalg.norm(x)) if period else 0.0
        x /= np.linalg.norm(x)
    assert net.rho == pytest.approx(math.exp(logs / (periods * net.period)), rel=1e-3)
    assert net.rho > 0.5


@pytest.mark.parametrize("name", ["bipartite-random-match", "two-random-matches"])
@pytest.mark.parametrize(("n", "rate"), [(2, 1.0), (7, 1.0), (8, 1.0), (6, 0.3)])
def test_rho_of_random_pairs_is_that_of_many_samples(n: int, rate: float, name: str) -> None:
    """rho^2 is the second eigenvalue of E[W'W], which 1500 samples know to a few percent."""
    net = topology.TOPOLOGIES[name](n, seed=1).lazy(rate)
    mean = np.zeros((n, n))
    samples = 1500
    for k in range(samples):
        W = net.rule(k).dense()
        mean += W.T @ W / samples
    second = np.linalg.eigvalsh(mean - 1 / n)[-1]
    assert net.rho**2 == pytest.approx(second, rel=0.06, abs=1e-12)


def test_rho_of_random_weights_that_are_not_pairs_is_sampled() -> None:
    def rule(step: int) -> SparseWeights:
        order = np.random.default_rng(step).permutation(5)
        return SparseWeights.from_dense(topology.ring(5).weights().numpy()[order][:, order])

    net = Topology("shuffled ring", 5, None, rule)
    expected = sum(rule(k).dense() @ rule(k).dense() for k in range(256)) / 256
    assert net.rho == pytest.approx(np.linalg.eigvalsh(expected)[-2] ** 0.5)


def test_rho_of_directed_weights_is_the_singular_value_even_if_eigenvalues_are_real() -> None:
    # 1/4 + u v' for orthogonal u, v off the average: eigenvalues 1 and 0, singular value |u| |v|
    u, v = np.array([1.0, -1, 0, 0]), np.array([0.0, 0, 1, -1])
    net = from_weights(1 / 4 + 0.1 * np.outer(u, v), directed=True)
    assert net.rho == pytest.approx(0.1 * 2)


def test_positive_definite_means_every_eigenvalue_above_zero() -> None:
    assert not topology.ring(8).positive_definite  # (1 + 2 cos pi) / 3 = -1/3
    assert topology.ring(8).lazy(0.5).positive_definite  # (1 - 1/3) / 2 = 1/3
    assert not topology.complete(4).positive_definite  # 0
    assert not topology.one_peer_exponential(8).positive_definite  # directed


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_exact_after_is_the_first_exact_product_of_a_period(name: str) -> None:
    for n in [*range(1, 18), 32, 33]:
        if "hypercube" in name and n & (n - 1):
            continue
        net = TOPOLOGIES[name](n)
        done, first = np.eye(n), None
        for k in range(min(net.period or 0, 40)):  # a long period of mixing only looks exact
            done = net.weights(k).numpy() @ done
            if first is None and abs(done - 1 / n).max() < 1e-13:
                first = k + 1
        if net.period is None:
            assert net.exact_after == (1 if n == 1 else None)
        else:
            assert net.exact_after == first, n
            assert (net.rho == 0) == (first is not None)
