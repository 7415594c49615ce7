"""The growth of disagreement equals the spectral radius of the recursion's own matrix."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from decentlam import algorithms
from decentlam.stability import growth, warn_if_unstable
from decentlam.topology import Topology, bipartite_random_match, mesh, one_peer_hypercube, ring


def heavy_ball_radius(topology: Topology, beta: float) -> float:
    """x+ = W_k x + beta (x - x-): the companion matrix of one period, off the average."""
    n, period = topology.num_nodes, topology.period
    assert period is not None
    off = np.eye(n) - 1 / n
    product = np.eye(2 * n)
    for k in range(period):
        w = topology.weights(k).numpy()
        step = np.block([[(w + beta * np.eye(n)) @ off, -beta * off], [off, np.zeros((n, n))]])
        product = step @ product
    return float(np.abs(np.linalg.eigvals(product)).max() ** (1 / period))


@pytest.mark.parametrize("topology", [ring(8), mesh(8), one_peer_hypercube(8)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_decentlam_growth_is_the_companion_spectral_radius(topology: Topology, beta: float) -> None:
    expected = heavy_ball_radius(topology, beta)
    measured = growth("decentlam", topology, beta, steps=2000)
    assert measured == pytest.approx(expected, rel=5e-3) or max(measured, expected) < 1e-3


def test_dsgd_growth_is_rho() -> None:
    assert growth("dsgd", mesh(8)) == pytest.approx(mesh(8).rho, rel=1e-6)


def test_random_matching_at_high_momentum_grows_and_at_low_momentum_shrinks() -> None:
    net = bipartite_random_match(8)
    assert 1.04 < growth("decentlam", net, 0.9, steps=2000) < 1.08
    assert growth("decentlam", net, 0.5) < 1
    assert growth("qg-dmsgd", net, 0.9) < 0.95


def test_an_unstable_run_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_unstable(algorithms.DecentLaM(0.9), ring(8))
        assert not caplog.records
        warn_if_unstable(algorithms.DecentLaM(0.9), bipartite_random_match(8))
        assert "will diverge" in caplog.text and "bipartite-random-match(8)" in caplog.text


def test_nesterov_on_negative_eigenvalues_is_announced_and_lazy_weights_cure_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_unstable(algorithms.DecentLaM(0.9, nesterov=True), mesh(8).lazy())
        assert not caplog.records
        warn_if_unstable(algorithms.DecentLaM(0.9, nesterov=True), mesh(8))
        assert "topology.lazy()" in caplog.text
