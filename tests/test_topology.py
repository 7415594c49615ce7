"""Every network of TOPOLOGIES through the same checks."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import runs
import torch
from networks import DIRECTED, every_periodic_topology, every_topology, networks, steps_of

from decentlam import topology
from decentlam.topology import (
    TOPOLOGIES,
    SparseWeights,
    Topology,
    from_weights,
)
from decentlam.topology.weights import pairs, symmetric_weights

# Contract ----------------------------------------------------------------------------------------


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
            assert net.bytes_sent(100, k).tolist() == [100 * count for count in sent]


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
    for net in networks(name, (2, 6, 8, 9)):
        net.weights(1)  # fills the cache, which copies leave behind
        for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), copy.copy(net)):
            assert repr(twin) == repr(net) and twin.fingerprint() == net.fingerprint()
            for k in range(5):
                assert torch.equal(twin.weights(k), net.weights(k))


def test_replaced_weights_are_not_those_remembered_of_the_original() -> None:
    net = topology.ring(4)
    assert net.neighbors(0) == [1, 3]  # remembered from here on
    assert replace(net, rule=topology.complete(4).rule).neighbors(0) == [1, 2, 3]
    assert net.neighbors(0) == [1, 3]


@pytest.mark.parametrize("n", [1, 2, 5, 8, 33])
def test_pairs_are_the_symmetric_weights_of_their_edges_to_the_bit(n: int) -> None:
    order = np.random.default_rng(n).permutation(n)
    for count in range(n // 2 + 1):
        left, right = order[:count], order[count : 2 * count]
        found = pairs(n, left, right)
        expected = symmetric_weights(n, left, right, np.full(count, 0.5))
        for name in ("starts", "columns", "values"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), (count, name)


def test_entries_of_the_same_place_are_added() -> None:
    rows, columns = np.array([1, 0, 1, 0]), np.array([0, 1, 0, 0])
    found = SparseWeights.from_entries(2, rows, columns, np.array([0.25, 0.5, 0.75, 0.5]))
    np.testing.assert_array_equal(found.dense(), [[0.5, 0.5], [1.0, 0.0]])
    assert found.starts.tolist() == [0, 2, 3] and found.columns.tolist() == [0, 1, 0]


def test_pickles_do_not_grow_with_the_steps_taken() -> None:
    net = topology.bipartite_random_match(64)
    size = len(pickle.dumps(net))
    for k in range(20):
        net.weights(k)
    assert len(pickle.dumps(net)) == size


def test_lazy_networks_pickle_too() -> None:
    net = pickle.loads(pickle.dumps(topology.ring(4).lazy(0.25)))
    np.testing.assert_allclose(net.weights()[0], [3 / 4 + 1 / 12, 1 / 12, 0, 1 / 12])


@every_topology
def test_eigenvalues_are_those_of_the_dense_matrix(name: str) -> None:
    """From 17 nodes on, rings and exponential graphs take the Fourier path."""
    for net in networks(name):
        for k in list(steps_of(net))[:2]:
            W, values = net.weights(k).numpy(), net.eigenvalues(k).numpy()
            if net.symmetric:
                np.testing.assert_allclose(values, np.linalg.eigvalsh(W)[::-1], rtol=0, atol=1e-12)
            else:
                # Sorting complex numbers is brittle: compare the traces of W, W^2, ... instead.
                power = np.eye(net.num_nodes)
                for exponent in range(1, 7):
                    power = power @ W
                    np.testing.assert_allclose(
                        (values**exponent).sum(), np.trace(power), rtol=0, atol=1e-10
                    )


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
        assert net.spectral_gap == 1 - net.rho
        assert 0 <= net.rho < 1


@pytest.mark.parametrize("n", [33, runs.slow_if(True, 65)])
def test_rho_of_a_long_period_is_the_decay_of_a_long_run(n: int) -> None:
    """65 or 132 steps leave less than 1e-20 of the disagreement, and yet never average exactly."""
    net = topology.one_peer_symmetric_exponential(n)
    assert net.period is not None and net.exact_after is None
    x = np.random.default_rng(0).standard_normal(n)
    periods, logs = 20, 0.0
    for period in range(periods + 1):  # the first one only forgets the start
        for k in range(net.period):
            x = net.weights(k).numpy() @ x
            x -= x.mean()
        logs += math.log(np.linalg.norm(x)) if period else 0.0
        x /= np.linalg.norm(x)
    assert net.rho == pytest.approx(math.exp(logs / (periods * net.period)), rel=1e-3)
    assert net.rho > 0.5


@pytest.mark.parametrize("n", [2, 7, 8, *(runs.slow_if(True, n) for n in (3, 4))])
def test_rho_of_random_pairs_is_that_of_many_samples(n: int) -> None:
    """rho^2 is the second eigenvalue of E[W'W], which 1500 samples know to a few percent."""
    net = topology.bipartite_random_match(n, seed=1)
    mean = np.zeros((n, n))
    samples = 1500
    for k in range(samples):
        W = net.rule(k).dense()
        mean += W.T @ W / samples
    second = np.linalg.eigvalsh(mean - 1 / n)[-1]
    assert net.rho**2 == pytest.approx(second, rel=0.06, abs=1e-12)


@pytest.mark.parametrize("rate", [0.3, runs.slow_if(True, 0.6)])
def test_rho_of_lazy_random_pairs_is_that_of_many_samples(rate: float) -> None:
    net = topology.bipartite_random_match(6, seed=2).lazy(rate)
    drawn = [net.rule(k).dense() for k in range(1500)]
    mean = sum(W.T @ W for W in drawn) / len(drawn)
    second = np.linalg.eigvalsh(mean - 1 / 6)[-1]
    assert net.rho**2 == pytest.approx(second, rel=0.06)


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


# Exact averaging ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("name", ["one-peer-exponential", "one-peer-hypercube"])
def test_log2_n_steps_of_one_peer_average_exactly(name: str, n: int) -> None:
    net = TOPOLOGIES[name](n)
    assert net.period == math.log2(n)
    for start in (0, 1, 5):  # any log2 n steps in a row, not only the first
        done = np.eye(n)
        for k in range(start, start + int(math.log2(n))):
            assert all(len(net.neighbors(i, k)) == 1 for i in range(n))
            done = net.weights(k).numpy() @ done
        np.testing.assert_allclose(done, np.full((n, n), 1 / n), rtol=0, atol=1e-15)
    assert net.rho == 0


def test_complete_averages_in_one_step() -> None:
    np.testing.assert_allclose(topology.complete(7).weights(), np.full((7, 7), 1 / 7))
    assert topology.complete(7).rho < 1e-15
