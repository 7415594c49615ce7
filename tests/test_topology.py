"""Every network of TOPOLOGIES through the same checks, small ones by hand, large ones sparse."""

from __future__ import annotations

import copy
import math
import pickle
import tracemalloc
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

import decentlam
from decentlam import topology
from decentlam.topology import (
    TOPOLOGIES,
    SparseWeights,
    Topology,
    from_edges,
    from_weights,
    spectrum,
)

SIZES = [*range(1, 18), 32, 33, 64]
DIRECTED = {"exponential": 3, "one-peer-exponential": 2}  # from more nodes than this on
SEVERAL_STEPS = 12  # of a random network


def networks(name: str, sizes: Iterable[int] = SIZES) -> Iterator[Topology]:
    for n in sizes:
        if "hypercube" not in name or n & (n - 1) == 0:
            net = TOPOLOGIES[name](n)
            assert net.num_nodes == n
            yield net


def steps_of(net: Topology) -> range:
    return range(SEVERAL_STEPS if net.period is None else net.period)


every_topology = pytest.mark.parametrize("name", TOPOLOGIES)
every_periodic_topology = pytest.mark.parametrize(
    "name", [name for name, constructor in TOPOLOGIES.items() if constructor(8).period is not None]
)


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


@pytest.mark.parametrize("n", [33, 65])
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


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
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


@pytest.mark.parametrize("pace", [0.3, 0.6])
def test_rho_of_lazy_random_pairs_is_that_of_many_samples(pace: float) -> None:
    net = topology.bipartite_random_match(6, seed=2).lazy(pace)
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


# By hand -----------------------------------------------------------------------------------------


def edges_of(net: Topology, step: int = 0) -> set[tuple[int, int]]:
    n = net.num_nodes
    return {(i, j) for i in range(n) for j in net.neighbors(i, step) if i < j}


def test_mesh_of_8_by_hand() -> None:
    # 0 1 2 3   corners have degree 2, the others 3. An edge of two corners weighs 1/3 (0-4, 3-7),
    # 4 5 6 7   any other 1/4. A corner keeps 1 - 1/3 - 1/4 = 5/12, the others 1 - 3/4 = 1/4.
    net = topology.mesh(8)
    assert edges_of(net) == {
        (0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (0, 4), (1, 5), (2, 6), (3, 7),
    }  # fmt: skip
    corner, edge, other = 5 / 12, 1 / 3, 1 / 4
    expected = [
        [corner, other, 0, 0, edge, 0, 0, 0],
        [other, 1 / 4, other, 0, 0, other, 0, 0],
        [0, other, 1 / 4, other, 0, 0, other, 0],
        [0, 0, other, corner, 0, 0, 0, edge],
        [edge, 0, 0, 0, corner, other, 0, 0],
        [0, other, 0, 0, other, 1 / 4, other, 0],
        [0, 0, other, 0, 0, other, 1 / 4, other],
        [0, 0, 0, edge, 0, 0, other, corner],
    ]
    np.testing.assert_allclose(net.weights(), expected, rtol=0, atol=1e-15)
    assert net.eigenvalues()[-1].item() == pytest.approx(-0.384, abs=1e-3)


@pytest.mark.parametrize(
    ("n", "shape"), [(1, "1 x 1"), (2, "1 x 2"), (7, "1 x 7"), (9, "3 x 3"), (12, "3 x 4")]
)
def test_mesh_takes_the_two_closest_factors(n: int, shape: str) -> None:
    assert topology.mesh(n).description == f"{shape} grid"


def test_torus_by_hand() -> None:
    # 3 x 3: everybody has 4 neighbors, weights 1/5
    net = topology.torus(9)
    assert net.neighbors(0) == [1, 2, 3, 6]
    np.testing.assert_allclose(5 * net.weights()[0], [1, 1, 1, 1, 0, 0, 1, 0, 0])
    # 2 x 2: opposite borders are the same edge, taken once
    assert edges_of(topology.torus(4)) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    # a prime is a ring
    assert torch.equal(topology.torus(5).weights(), topology.ring(5).weights())


def test_star_of_4_by_hand() -> None:
    # The middle has degree 3, so every edge weighs 1/4; the middle keeps 1/4, the leaves 3/4.
    expected = [[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]
    assert (4 * topology.star(4).weights()).tolist() == expected


def test_ring_by_hand() -> None:
    # Two nodes share one edge: degree 1, weights 1/2. Three are complete: weights 1/3.
    assert topology.ring(2).weights().tolist() == [[0.5, 0.5], [0.5, 0.5]]
    np.testing.assert_allclose(topology.ring(3).weights(), np.full((3, 3), 1 / 3))
    assert topology.ring(5).neighbors(0) == [1, 4]
    for n in (5, 8):
        assert topology.ring(n).rho == pytest.approx((1 + 2 * math.cos(2 * math.pi / n)) / 3)


def test_exponential_by_hand() -> None:
    # 6 nodes hear i - 1, i - 2, i - 4 and themselves, 1/4 each
    net = topology.exponential(6)
    assert net.row(0) == {0: 0.25, 2: 0.25, 4: 0.25, 5: 0.25}
    assert net.listeners(0) == [1, 2, 4]


def test_one_peer_exponential_by_hand() -> None:
    net = topology.one_peer_exponential(6)
    assert net.period == 3
    assert [net.neighbors(0, k) for k in range(4)] == [[5], [4], [2], [5]]
    assert [net.listeners(0, k) for k in range(4)] == [[1], [2], [4], [1]]
    assert net.row(0, 2) == {0: 0.5, 2: 0.5}


def test_hypercube_by_hand() -> None:
    assert topology.hypercube(8).neighbors(5) == [1, 4, 7]  # 101: 001, 100, 111
    assert topology.hypercube(8).row(5) == {1: 0.25, 4: 0.25, 5: 0.25, 7: 0.25}
    assert [topology.one_peer_hypercube(8).neighbors(5, k) for k in range(3)] == [[4], [7], [1]]


def test_symmetric_exponential_of_8_by_hand() -> None:
    # floor(log2 7) = 2: odd i with i + 1 and i + 3
    assert edges_of(topology.symmetric_exponential(8)) == {
        (1, 2), (3, 4), (5, 6), (0, 7),
        (1, 4), (3, 6), (0, 5), (2, 7),
    }  # fmt: skip
    # degree 2 everywhere: a ring in another order
    assert topology.symmetric_exponential(8).row(1) == {
        1: pytest.approx(1 / 3), 2: pytest.approx(1 / 3), 4: pytest.approx(1 / 3),
    }  # fmt: skip


def test_symmetric_exponential_of_16_by_hand() -> None:
    # floor(log2 15) = 3: odd i with i + 1, i + 3, i + 7; the even ones are found by those
    net = topology.symmetric_exponential(16)
    assert net.neighbors(1) == [2, 4, 8]
    assert net.neighbors(15) == [0, 2, 6]
    assert net.neighbors(0) == [9, 13, 15]


def test_symmetric_exponential_of_small_and_odd_numbers_by_hand() -> None:
    assert edges_of(topology.symmetric_exponential(2)) == {(0, 1)}
    # 4: hops 1 and 3 (hop 1 alone would leave two separate pairs) make a ring
    assert edges_of(topology.symmetric_exponential(4)) == {(1, 2), (0, 3), (0, 1), (2, 3)}
    # 6: odd i with i + 1, i + 3
    assert edges_of(topology.symmetric_exponential(6)) == {
        (1, 2), (3, 4), (0, 5), (1, 4), (0, 3), (2, 5),
    }  # fmt: skip
    # odd n: every i with i +- 1 and i +- 3, and from 9 on i +- 7
    assert topology.symmetric_exponential(7).neighbors(0) == [1, 3, 4, 6]
    assert topology.symmetric_exponential(11).neighbors(0) == [1, 3, 4, 7, 8, 10]
    # 5: +- 3 is +- 2, so this is complete; 3 is a ring
    assert topology.symmetric_exponential(5).rho < 1e-15
    assert edges_of(topology.symmetric_exponential(3)) == {(0, 1), (0, 2), (1, 2)}


def test_one_peer_symmetric_exponential_by_hand() -> None:
    net = topology.one_peer_symmetric_exponential(8)
    assert net.period == 2
    assert edges_of(net, 0) == {(1, 2), (3, 4), (5, 6), (0, 7)}
    assert edges_of(net, 1) == {(1, 4), (3, 6), (0, 5), (2, 7)}
    union = edges_of(net, 0) | edges_of(net, 1)
    assert union == edges_of(topology.symmetric_exponential(8))


def test_one_peer_symmetric_exponential_rests_in_turn_when_n_is_odd() -> None:
    net = topology.one_peer_symmetric_exponential(5)
    for k in range(10):
        resting = [i for i in range(5) if not net.neighbors(i, k)]
        assert resting == [k % 5]
        assert net.row(k % 5, k) == {k % 5: 1.0}


def test_bluefog_symmetric_exponential_by_hand() -> None:
    assert topology.bluefog_symmetric_exponential(8).neighbors(0) == [1, 4, 7]
    assert topology.bluefog_symmetric_exponential(16).neighbors(0) == [1, 4, 12, 15]


# Random pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 8, 9])
def test_random_pairs_leave_one_node_resting_only_when_n_is_odd(n: int) -> None:
    net = topology.bipartite_random_match(n)
    for k in range(50):
        partners = [net.neighbors(i, k) for i in range(n)]
        assert sum(not partner for partner in partners) == n % 2
        for i, partner in enumerate(partners):
            for j in partner:
                assert partners[j] == [i] and net.row(i, k) == {i: 0.5, j: 0.5}


def test_random_pairs_depend_on_seed_and_step_alone() -> None:
    one, twin, other = (topology.bipartite_random_match(8, seed=s) for s in (7, 7, 8))
    for k in (11, 3, 200, 3):  # in any order
        assert torch.equal(one.weights(k), twin.weights(k))
    assert any(not torch.equal(one.weights(k), other.weights(k)) for k in range(5))
    assert len({tuple(sorted(edges_of(one, k))) for k in range(30)}) > 15  # of 105 pairings


def test_random_pairs_are_uniform() -> None:
    """4 nodes have 3 pairings; in 1200 draws the count of each varies by 16."""
    net = topology.bipartite_random_match(4, seed=5)
    partner_of_0 = [list(net.rule(k).row(0))[1] for k in range(1200)]
    for partner in (1, 2, 3):
        assert partner_of_0.count(partner) == pytest.approx(400, abs=65)


# The user's own networks -------------------------------------------------------------------------


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


# Many nodes --------------------------------------------------------------------------------------


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
