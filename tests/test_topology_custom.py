"""The user's own networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import decentlam
from decentlam import topology
from decentlam.topology import (
    TOPOLOGIES,
    from_edges,
    from_weights,
)


def test_from_edges_takes_each_edge_once_in_any_order() -> None:
    net = from_edges(3, [(0, 1), (1, 0), (2, 1), (1, 2)])
    # degrees 1, 2, 1: both edges weigh 1/3
    np.testing.assert_allclose(net.weights() * 3, [[2, 1, 0], [1, 1, 1], [0, 1, 2]])


def test_from_edges_with_uniform_weights() -> None:
    net = from_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0)], weights="uniform")
    assert torch.equal(net.weights(), topology.ring(4).weights())


def test_from_edges_of_one_node_has_no_edges() -> None:
    assert from_edges(1, []).weights().tolist() == [[1.0]]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list])
def test_from_weights_takes_arrays_tensors_and_lists(kind) -> None:
    W = [[0.75, 0.25], [0.25, 0.75]]
    assert from_weights(kind(W)).weights().tolist() == W


def test_from_weights_is_symmetric_to_the_last_bit() -> None:
    """It accepts W that is symmetric to 1e-9, and DecentLaM must accept what it accepted."""
    W = topology.ring(5).weights().numpy()
    W[0, 1] += 4e-10
    W[0, 0] -= 4e-10
    net = from_weights(W)
    assert net.symmetric
    decentlam.Nodes("decentlam", net, torch.zeros(5, 1))


def test_numpy_integers_are_numbers_of_nodes() -> None:
    for name, constructor in TOPOLOGIES.items():
        net = constructor(np.int64(8))
        assert type(net.num_nodes) is int, name
        assert torch.equal(net.weights(1), constructor(8).weights(1))


def test_lazy_by_hand() -> None:
    # (1 - 1/4) I + 1/4 [[1/2, 1/2], [1/2, 1/2]]
    assert topology.ring(2).lazy(0.25).weights().tolist() == [[0.875, 0.125], [0.125, 0.875]]
    assert torch.equal(topology.mesh(8).lazy(1.0).weights(), topology.mesh(8).weights())
