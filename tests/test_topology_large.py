"""A thousand nodes never need a dense matrix."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

import decentlam
from decentlam import topology
from decentlam.topology import (
    TOPOLOGIES,
    SparseWeights,
    spectrum,
)


@pytest.mark.parametrize(
    "name",
    [
        "ring",
        "symmetric-exponential",
        "one-peer-hyper-cuboid",
        "base-3",
        "bipartite-random-match",
        "equitopo-one-peer",
        "equitopo-static",
    ],
)
def test_1024_nodes_never_need_a_dense_matrix(name: str, monkeypatch) -> None:
    def refuse(self: SparseWeights) -> np.ndarray:
        raise AssertionError("a dense n x n matrix was built")

    monkeypatch.setattr(SparseWeights, "dense", refuse)
    net = TOPOLOGIES[name](1024)
    assert net.symmetric and net.doubly_stochastic and sum(net.row(5).values()) == pytest.approx(1)
    x0 = torch.arange(1024.0)[:, None].repeat(1, 4)
    x = decentlam.simulate("decentlam", net, x0, lambda x, k: x, lr=0.1, steps=3)
    assert x.shape == (1024, 4) and torch.isfinite(x).all()


@pytest.mark.parametrize("name", ["ring", "symmetric-exponential"])
def test_1024_nodes_have_small_weights_and_a_quick_rho(name: str) -> None:
    tracemalloc.start()
    try:
        net = TOPOLOGIES[name](1024)
        net.row(3), net.neighbors(7), net.messages(), net.fingerprint(), net.rho
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 1024 * 8 / 4  # a dense matrix alone takes four times as much


def test_sparse_and_dense_mixing_agree() -> None:
    """Above 64 nodes the exchange switches to a sparse product."""
    torch.manual_seed(0)
    for n in (64, 65, 100):
        net, x0 = topology.symmetric_exponential(n), torch.randn(n, 3, dtype=torch.float64)
        x = decentlam.simulate("dsgd", net, x0, lambda x, k: torch.zeros_like(x), 0.1, 4)
        np.testing.assert_allclose(
            x, np.linalg.matrix_power(net.weights().numpy(), 4) @ x0.numpy(), rtol=0, atol=1e-13
        )


@pytest.mark.parametrize(
    "name", ["ring", "exponential", "symmetric-exponential", "bluefog-symmetric-exponential"]
)
def test_fourier_eigenvalues_of_64_nodes_are_the_dense_ones(name: str, monkeypatch) -> None:
    net = TOPOLOGIES[name](64)
    dense = np.linalg.eigvals(net.weights().numpy())
    monkeypatch.setattr(SparseWeights, "dense", None)  # only the Fourier path is left
    fast = spectrum.eigenvalues(net.sparse())
    if net.symmetric:
        np.testing.assert_allclose(np.sort(fast), np.sort(dense.real), rtol=0, atol=1e-12)
    else:
        distance = np.abs(fast[:, None] - dense[None, :])
        assert distance.min(0).max() < 1e-12 and distance.min(1).max() < 1e-12
