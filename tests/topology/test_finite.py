"""Networks that average exactly in finitely many steps."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from decentlam import topology
from decentlam.analysis.stability import growth
from decentlam.topology import Topology, base_graph


def product(net: Topology, steps: range) -> np.ndarray:
    done = np.eye(net.num_nodes)
    for k in steps:
        done = net.weights(k).numpy() @ done
    return done


def check_steps(net: Topology, most_peers: int) -> None:
    """Symmetric, doubly stochastic, not negative, and few peers, at every step of a period."""
    assert net.period is not None
    for k in range(net.period):
        W = net.weights(k).numpy()
        assert (W >= 0).all() and (W == W.T).all()
        np.testing.assert_allclose(W.sum(1), 1, rtol=0, atol=1e-14)
        assert (W > 0).sum(1).max() <= 1 + most_peers
    assert net.symmetric and net.doubly_stochastic


# All to 33, then powers, neighbors of powers, and numbers of many factors.
MANY_N = [*range(1, 34), 64, 70, 81, 127, 200]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_base_graphs_of_any_n_average_exactly_with_k_peers_in_the_papers_time(k: int) -> None:
    for n in MANY_N:
        net = base_graph(n, k)
        assert net.period is not None
        check_steps(net, k)
        np.testing.assert_allclose(product(net, range(net.period)), 1 / n, rtol=0, atol=1e-14)
        assert net.exact_after == net.period and net.rho == 0
        assert net.period <= 2 * math.log(n, k + 1) + 2 + 1e-9  # of Takezawa et al.


def test_base_2_of_5_by_hand() -> None:
    """5 = 4 + 1. Nodes 0-3 average in 2 steps; node 4 takes 4/5 of node 0, which takes 4/5 of it,
    while two of the resting average; 2 more steps spread what node 0 holds."""
    net = topology.base_2(5)
    assert net.period == 5
    pairs = [{(i, j) for i in range(5) for j in net.neighbors(i, k) if i < j} for k in range(5)]
    assert pairs == [
        {(0, 1), (2, 3)}, {(0, 2), (1, 3)}, {(0, 4), (1, 2)}, {(0, 1), (2, 3)}, {(0, 2), (1, 3)},
    ]  # fmt: skip
    assert net.row(4, 2) == {0: 0.8, 4: pytest.approx(0.2)}
    assert net.row(3, 2) == {3: 1.0}
    # All mass at node 4, in exact fractions: after step 2 nodes 0 and 4 hold 4/5 and 1/5.
    x = [Fraction(0)] * 4 + [Fraction(1)]
    for k in range(5):
        x = [
            sum((Fraction(w).limit_denominator(10) * x[j] for j, w in net.row(i, k).items()))
            for i in range(5)
        ]
        if k == 2:
            assert x == [Fraction(4, 5), 0, 0, 0, Fraction(1, 5)]
    assert x == [Fraction(1, 5)] * 5


def test_base_4_of_14_by_hand() -> None:
    """14 = 3 x 4 + 2: nodes 12 and 13 meet one node of each part 0-3, 4-7, 8-11 at step 2."""
    net = base_graph(14, 3)
    assert net.period == 2 + 1 + 1 and net.description == "14 = 12 + 2, at most 3 peers"
    assert net.neighbors(0, 0) == [1, 2, 3] and net.neighbors(0, 1) == [4, 8]
    assert net.row(13, 2) == {
        1: pytest.approx(4 / 14), 5: pytest.approx(4 / 14), 9: pytest.approx(4 / 14),
        13: pytest.approx(2 / 14),
    }  # fmt: skip
    assert net.neighbors(2, 2) == [3, 6, 7]  # those without a partner
    assert net.neighbors(0, 3) == [1, 2, 3]


def test_exactness_of_base_graphs_is_one_of_whole_periods() -> None:
    net = topology.base_2(5)
    np.testing.assert_allclose(product(net, range(10, 15)), 1 / 5, rtol=0, atol=1e-14)
    assert abs(product(net, range(1, 6)) - 1 / 5).max() > 0.05


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "2"])
def test_base_graph_refuses_other_numbers_of_peers(k) -> None:
    with pytest.raises(ValueError, match="k, the most peers, of 1 or more, got"):
        base_graph(5, k)


def test_decentlam_is_stable_on_two_commuting_averages() -> None:
    """Off the average they keep 1, 0 | 0, 1 | 0, 0 in turn; each pair of steps has |z| = beta."""
    for net in (base_graph(16, 3), base_graph(20, 4)):
        assert net.period == 2
        for beta in (0.5, 0.9, 0.99):
            assert growth("decentlam", net, beta) == pytest.approx(beta**0.5, rel=0.01)
