"""Networks that change with the step: by hand, and random pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decentlam import topology
from decentlam.topology import TOPOLOGIES
from tests.helpers.networks import edges_of


def test_one_peer_exponential_by_hand() -> None:
    net = topology.one_peer_exponential(6)
    assert net.period == 3
    assert [net.neighbors(0, k) for k in range(4)] == [[5], [4], [2], [5]]
    assert [net.listeners(0, k) for k in range(4)] == [[1], [2], [4], [1]]
    assert net.row(0, 2) == {0: 0.5, 2: 0.5}


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


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_two_pairings_give_each_partner_a_third(n: int) -> None:
    """Row i holds a third for the node and one for its partner in each pairing; who rests in a
    pairing keeps that third. The first pairing is the one of bipartite_random_match."""
    net, single = topology.two_random_matches(n, seed=3), topology.bipartite_random_match(n, seed=3)
    rests = same = 0
    for k in range(60):
        W = 3 * net.weights(k).numpy()
        partner = [(single.neighbors(i, k) or [i])[0] for i in range(n)]
        second = W - np.eye(n) - np.eye(n)[partner]
        np.testing.assert_allclose(second @ second, np.eye(n), rtol=0, atol=1e-14)  # a pairing
        np.testing.assert_allclose(second, np.round(second), rtol=0, atol=1e-14)
        rests += int(np.trace(second).round())
        same += np.allclose(second, np.eye(n)[partner])
    assert rests == 60 * (n % 2)
    assert same == 60 if n == 2 else 0 < same < 40 if n < 5 else same < 10
    assert net.max_peers == min(2, n - 1) and net.period is None


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
