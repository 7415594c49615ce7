"""Every network of TOPOLOGIES through the same checks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

import decentlam
from decentlam import topology
from decentlam.topology import TOPOLOGIES, SparseWeights
from tests.helpers.networks import (
    DIRECTED,
    every_periodic_topology,
    every_topology,
    networks,
    steps_of,
)
from tests.helpers.refusals import Refusal, assert_refused, each_refused


@every_topology
def test_weights_are_doubly_stochastic_and_symmetric_when_promised(name: str) -> None:
    for net in networks(name):
        for k in steps_of(net):
            W = net.weights(k)
            assert W.shape == (net.num_nodes, net.num_nodes) and W.dtype == torch.float64
            assert (W >= 0).all()
            np.testing.assert_allclose(W.sum(1), 1, rtol=0, atol=1e-14)
            np.testing.assert_allclose(W.sum(0), 1, rtol=0, atol=1e-14)
            if net.symmetric:
                assert torch.equal(W, W.T)
        assert net.doubly_stochastic
        # In the smallest directed graphs every arc has its opposite.
        assert net.symmetric == (name not in DIRECTED or net.num_nodes <= DIRECTED[name])


@every_periodic_topology
def test_weights_repeat_after_the_period_and_not_before(name: str) -> None:
    for net in networks(name):
        assert net.period is not None
        cycle = [net.weights(k) for k in range(net.period)]
        for k in (net.period, 2 * net.period + 1):
            assert torch.equal(net.weights(k), cycle[k % net.period])
        for shorter in range(1, net.period):
            if net.period % shorter == 0:
                assert any(
                    not torch.equal(cycle[k], cycle[(k + shorter) % net.period])
                    for k in range(net.period)
                )
        assert net.static == (net.period == 1)


@every_topology
def test_rows_neighbors_listeners_and_messages_agree_with_the_weights(name: str) -> None:
    for net in networks(name):
        nodes = range(net.num_nodes)
        for k in list(steps_of(net))[:8]:
            W = net.weights(k).numpy()
            for i in nodes:
                assert net.row(i, k) == {j: W[i, j] for j in nodes if W[i, j] != 0}
                assert net.neighbors(i, k) == [j for j in nodes if j != i and W[i, j] > 0]
                assert net.listeners(i, k) == [j for j in nodes if j != i and W[j, i] > 0]
            sent = [len(net.listeners(i, k)) for i in nodes]
            assert net.messages(k).tolist() == sent


@every_topology
def test_every_node_hears_of_every_other_within_a_period(name: str) -> None:
    for net in networks(name):
        steps = range(200) if net.period is None else steps_of(net)
        linked = np.zeros((net.num_nodes, net.num_nodes), dtype=bool)
        for k in steps:
            linked |= net.weights(k).numpy() > 0
        heard = np.eye(net.num_nodes, dtype=int)
        for _ in range(net.num_nodes):
            heard = ((linked.astype(int) @ heard) > 0).astype(int)
        assert heard.all()


@every_topology
def test_one_node_mixes_with_itself(name: str) -> None:
    net = TOPOLOGIES[name](1)
    for k in range(3):
        assert net.weights(k).tolist() == [[1.0]]
        assert net.neighbors(0, k) == net.listeners(0, k) == []
        assert net.messages(k).tolist() == [0]
    assert net.rho == 0.0


@every_topology
def test_pickle_and_deepcopy_keep_the_weights(name: str) -> None:
    for net in (*networks(name, (2, 6, 8, 9)), TOPOLOGIES[name](8).lazy(0.25)):
        size = len(pickle.dumps(net))
        net.weights(1)  # fills the cache, which copies leave behind
        assert len(pickle.dumps(net)) == size
        for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), copy.copy(net)):
            assert repr(twin) == repr(net) and twin.fingerprint() == net.fingerprint()
            for k in range(5):
                assert torch.equal(twin.weights(k), net.weights(k))


def test_fingerprints_tell_networks_apart() -> None:
    nets = [
        topology.ring(8),
        topology.ring(9),
        topology.mesh(8),
        topology.ring(8).lazy(0.5),
        topology.bipartite_random_match(8, seed=0),
        topology.bipartite_random_match(8, seed=1),
    ]
    assert len({net.fingerprint() for net in nets}) == len(nets)


def test_numpy_integers_are_numbers_of_nodes() -> None:
    for name, constructor in TOPOLOGIES.items():
        net = constructor(np.int64(8))
        assert type(net.num_nodes) is int, name
        assert torch.equal(net.weights(1), constructor(8).weights(1))


def test_lazy_by_hand() -> None:
    # (1 - 1/4) I + 1/4 [[1/2, 1/2], [1/2, 1/2]]
    assert topology.ring(2).lazy(0.25).weights().tolist() == [[0.875, 0.125], [0.125, 0.875]]
    assert torch.equal(topology.mesh(8).lazy(1.0).weights(), topology.mesh(8).weights())


@pytest.mark.parametrize("name", ["symmetric-exponential", "base-4", "two-random-matches"])
def test_1024_nodes_never_need_a_dense_matrix(name: str, monkeypatch) -> None:
    def refuse(self: SparseWeights) -> np.ndarray:
        raise AssertionError("a dense n x n matrix was built")

    monkeypatch.setattr(SparseWeights, "dense", refuse)
    net = TOPOLOGIES[name](1024)
    assert net.symmetric and net.doubly_stochastic and sum(net.row(5).values()) == pytest.approx(1)
    x0 = torch.arange(1024.0)[:, None].repeat(1, 4)
    x = decentlam.simulate("decentlam", net, x0, lambda x, k: x, lr=0.1, steps=3)
    assert x.shape == (1024, 4) and torch.isfinite(x).all()


REFUSALS: list[Refusal] = [
    ("no nodes", lambda: topology.ring(0), ValueError, ["ring", "at least 1", "got 0"]),
    ("n a float", lambda: topology.mesh(8.0), TypeError, ["mesh", "whole number", "got 8.0"]),
    ("n a bool", lambda: topology.complete(True), TypeError, ["complete", "whole number", "True"]),
    ("n without end", lambda: topology.base_4(10**400), ValueError, ["at most 1,000,000 nodes"]),
    ("too many edges", lambda: topology.complete(200_000), ValueError, ["at most 5,000 nodes"]),
    ("hypercube of 6", lambda: topology.hypercube(6), ValueError,
     ["power of two", "got 6", "4 or 8", "symmetric-exponential"]),
    ("pairs across bits of 6", lambda: topology.one_peer_hypercube(6), ValueError,
     ["one_peer_hypercube", "got 6", "4 or 8"]),
    ("rank out of range", lambda: topology.ring(4).row(4), ValueError,
     ["ring(4)", "0 to 3", "no 4"]),
    ("negative step", lambda: topology.ring(4).weights(-1), ValueError,
     ["step", "0 or more", "got -1"]),
    ("negative seed", lambda: topology.bipartite_random_match(4, seed=-1), ValueError,
     ["seed", "0 or more", "got -1"]),
    ("no rate", lambda: topology.ring(4).lazy(0), ValueError, ["rate", "(0, 1]", "got 0"]),
]  # fmt: skip


@each_refused(REFUSALS)
def test_refuses_with_what_was_given_and_the_cure(
    call: Callable[[], object], kind: type[Exception], words: list[str]
) -> None:
    assert_refused(call, kind, words)
