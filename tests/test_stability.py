"""The growth of disagreement equals the spectral radius of the recursion's own matrix."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

import decentlam
from decentlam.stability import growth
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


def test_the_optimizer_warns_before_an_unstable_run(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = decentlam.DecentLaM([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    assert not caplog.records
    optimizer.topology = bipartite_random_match(8)
    optimizer._algorithm = decentlam.algorithms.DecentLaM(0.9)
    with caplog.at_level(logging.WARNING):
        optimizer._warn_if_unstable()
    assert "will diverge" in caplog.text and "bipartite-random-match(8)" in caplog.text
