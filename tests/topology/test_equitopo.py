"""Random networks whose rate does not depend on the number of nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decentlam import topology


@pytest.mark.parametrize("n", [2, 3, 8, 9, 12, 15, 35])
def test_equitopo_pairs_lie_along_one_hop_and_one_node_per_odd_cycle_rests(n: int) -> None:
    net = topology.equitopo_one_peer(n, seed=3)
    hops = set()
    for k in range(60):
        partners = [net.neighbors(i, k) for i in range(n)]
        found = {min((j - i) % n, (i - j) % n) for i in range(n) for j in partners[i]}
        assert len(found) == 1
        hops |= found
        cycles = math.gcd(found.pop(), n)
        assert sum(not partner for partner in partners) == (cycles if n // cycles % 2 else 0)
        for i, partner in enumerate(partners):
            for j in partner:
                assert partners[j] == [i] and net.row(i, k) == {i: 0.5, j: 0.5}
    assert hops == set(range(1, n // 2 + 1)) or n == 35


def test_equitopo_depends_on_seed_and_step_alone() -> None:
    one, twin, other = (topology.equitopo_one_peer(12, seed=s) for s in (4, 4, 5))
    for k in (9, 2, 300, 2):
        assert torch.equal(one.weights(k), twin.weights(k))
    assert any(not torch.equal(one.weights(k), other.weights(k)) for k in range(5))
    static, again = (topology.equitopo_static(40, seed=1) for _ in range(2))
    assert torch.equal(static.weights(), again.weights())
    with pytest.raises(ValueError, match="seed must be"):
        topology.equitopo_static(8, seed=-1)


@pytest.mark.parametrize("n", [3, 4, 6, 9, 15])
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_rho_of_equitopo_pairs_is_that_of_all_draws(n: int, rate: float) -> None:
    """E[W'W] over every hop and every start of one cycle, the others being independent of it."""
    net = topology.equitopo_one_peer(n).lazy(rate)
    mean = np.zeros((n, n))
    for hop in range(1, n):
        cycles = math.gcd(hop, n)
        length = n // cycles
        for start in range(length):  # W'W is linear in the cycles: one start for all will do
            W = np.eye(n)
            for cycle in range(cycles):
                for pair in range(length // 2):
                    i = (cycle + hop * (start + 2 * pair)) % n
                    j = (i + hop) % n
                    W[[i, i, j, j], [i, j, i, j]] = 0.5
            W = (1 - rate) * np.eye(n) + rate * W
            mean += W.T @ W / (n - 1) / length
    second = np.linalg.eigvalsh(mean - 1 / n)[-1]
    assert net.rho**2 == pytest.approx(second, abs=1e-12)


def test_rate_of_equitopo_pairs_does_not_grow_with_n() -> None:
    """Song et al. prove sqrt(2/3) = 0.816 for their form; the worst n here is 15."""
    rates = {n: topology.equitopo_one_peer(n).rho for n in range(2, 1025)}
    assert max(rates.values()) == rates[15] == pytest.approx(0.74322, abs=1e-5)
    assert all(0.65 < rates[n] < 0.75 for n in range(8, 1025))


@pytest.mark.parametrize("n", [8, 15, 64, 512])
def test_measured_rate_of_equitopo_pairs_is_rho(n: int) -> None:
    """Mean square disagreement after 8 steps, over 150 seeds and 8 random starts for each."""
    left = 0.0
    for seed in range(150):
        net = topology.equitopo_one_peer(n, seed)
        x = np.random.default_rng(seed).standard_normal((n, 8))
        x -= x.mean(0)
        x /= np.linalg.norm(x)
        for k in range(8):
            x = net.sparse(k).apply(x)
        left += np.square(x).sum() / 150
    assert left ** (1 / 16) == pytest.approx(topology.equitopo_one_peer(n).rho, rel=0.04)


def test_static_equitopo_by_hand() -> None:
    # All hops average exactly: 1/n + (1 - 1/n) times the mean of the n - 1 shifts.
    assert topology.equitopo_static(6, hops=5).exact_after == 1
    assert topology.equitopo_static(6, hops=99).exact_after == 1
    # One hop of 5 nodes is a ring: 1/5 of oneself and 2/5 of each neighbor
    net = topology.equitopo_static(5, hops=1)
    assert sorted(net.row(0).values()) == pytest.approx([0.2, 0.4, 0.4])
    with pytest.raises(ValueError, match="hops must be"):
        topology.equitopo_static(8, hops=0)


def test_static_equitopo_keeps_its_rate_with_log_n_peers() -> None:
    for n in range(2, 130):
        net = topology.equitopo_static(n)
        assert net.max_peers <= 2 * math.ceil(math.log2(n)) and net.rho < 0.56
    assert topology.equitopo_static(1024).rho < 0.6
