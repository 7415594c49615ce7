"""Networks that average exactly in finitely many steps, and random ones whose rate ignores n."""

from __future__ import annotations

import math
import runpy
import time
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import runs
import torch

from decentlam import topology
from decentlam.analysis.stability import growth
from decentlam.topology import TOPOLOGIES, SparseWeights, Topology, base_graph

# All to 100, then primes, powers, neighbors of powers, and numbers of many factors.
MANY_N = [*range(1, 101), 120, 121, 125, 127, 128, 129, 144, 169, 180, 192, 197, 199, 200]
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "topologies.md"


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


# Base-(k+1) graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize("simple", [False, True], ids=["base", "simple"])
@pytest.mark.parametrize("k", [1, 2, *(runs.slow_if(True, k) for k in (3, 4))])
def test_base_graphs_of_any_n_average_exactly_with_k_peers_in_the_papers_time(
    k: int, simple: bool
) -> None:
    for n in range(1, 101) if simple else MANY_N:
        net = base_graph(n, k, simple)
        assert net.period is not None
        check_steps(net, k)
        np.testing.assert_allclose(product(net, range(net.period)), 1 / n, rtol=0, atol=1e-14)
        assert net.exact_after == net.period and net.rho == 0
        assert net.period <= 2 * math.log(n, k + 1) + 2 + 1e-9  # of Takezawa et al.
        assert net.period <= max(1, base_graph(n, k, simple=True).period or 0)


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
    net = base_graph(14, 3, simple=True)
    assert net.period == 2 + 1 + 1 and net.description == "14 = 12 + 2, at most 3 peers"
    assert net.neighbors(0, 0) == [1, 2, 3] and net.neighbors(0, 1) == [4, 8]
    assert net.row(13, 2) == {
        1: pytest.approx(4 / 14), 5: pytest.approx(4 / 14), 9: pytest.approx(4 / 14),
        13: pytest.approx(2 / 14),
    }  # fmt: skip
    assert net.neighbors(2, 2) == [3, 6, 7]  # those without a partner
    assert net.neighbors(0, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("n", "k", "simple", "base"),
    # 6 = 2 x 3 and 3 takes 3 steps; 12 = 2 x 2 x 3; 24 = 8 x 3; 7 is prime
    [(6, 1, 5, 4), (12, 2, 5, 3), (21, 2, 6, 5), (7, 1, 5, 5), (24, 1, 9, 6)],
)
def test_common_factors_shorten_base_graphs(n: int, k: int, simple: int, base: int) -> None:
    assert base_graph(n, k, simple=True).period == simple
    assert base_graph(n, k).period == base


def test_exactness_of_base_graphs_is_one_of_whole_periods() -> None:
    net = topology.base_2(5)
    np.testing.assert_allclose(product(net, range(10, 15)), 1 / 5, rtol=0, atol=1e-14)
    assert abs(product(net, range(1, 6)) - 1 / 5).max() > 0.05


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "2"])
def test_base_graph_refuses_other_numbers_of_peers(k) -> None:
    with pytest.raises(ValueError, match="k, the most peers, of 1 or more, got"):
        base_graph(5, k)


# Hyper-cuboids -----------------------------------------------------------------------------------


def test_hyper_cuboids_average_exactly_in_any_as_many_steps_as_n_has_prime_factors() -> None:
    for n in MANY_N:
        net = topology.one_peer_hyper_cuboid(n)
        primes = [p for p in range(2, n + 1) if all(p % q for q in range(2, p))]
        count = sum(n % p**e == 0 for p in primes for e in range(1, 8) if p**e <= n)
        assert net.period == net.exact_after == max(1, count)
        largest = max((p for p in primes if n % p == 0), default=1)
        check_steps(net, largest - 1)
        assert net.max_peers == largest - 1
        for start in (0, 1) if n < 50 else (0,):
            done = product(net, range(start, start + net.period))
            np.testing.assert_allclose(done, 1 / n, rtol=0, atol=1e-14)


def test_hyper_cuboids_of_powers_of_two_are_one_peer_hypercubes() -> None:
    for n in (1, 2, 4, 8, 64):
        cuboid, cube = topology.one_peer_hyper_cuboid(n), topology.one_peer_hypercube(n)
        assert cuboid.period == cube.period
        assert all(torch.equal(cuboid.weights(k), cube.weights(k)) for k in range(8))


def test_hyper_cuboid_of_6_by_hand() -> None:
    # 6 = 2 x 3: pairs 01 23 45, then threes 024 135
    net = topology.one_peer_hyper_cuboid(6)
    assert [net.neighbors(i, 0) for i in range(6)] == [[1], [0], [3], [2], [5], [4]]
    assert [net.neighbors(i, 1) for i in range(6)] == [
        [2, 4],
        [3, 5],
        [0, 4],
        [1, 5],
        [0, 2],
        [1, 3],
    ]
    np.testing.assert_allclose(net.weights(1)[0] * 3, [1, 0, 1, 0, 1, 0], rtol=0, atol=1e-15)


# exact_after -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_exact_after_is_the_first_exact_product_of_a_period(name: str) -> None:
    for n in [*range(1, 18), 32, 33]:
        if "hypercube" in name and n & (n - 1):
            continue
        net = TOPOLOGIES[name](n)
        done, first = np.eye(n), None
        for k in range(min(net.period or 0, 40)):  # a long period of mixing only looks exact
            done = net.weights(k).numpy() @ done
            if first is None and abs(done - 1 / n).max() < 1e-13:
                first = k + 1
        if net.period is None:
            assert net.exact_after == (1 if n == 1 else None)
        else:
            assert net.exact_after == first, n
            assert (net.rho == 0) == (first is not None)


def test_exact_after_of_known_networks() -> None:
    assert topology.complete(7).exact_after == topology.ring(3).exact_after == 1
    assert topology.ring(4).exact_after is None
    assert topology.one_peer_exponential(8).exact_after == 3
    assert topology.one_peer_exponential(6).exact_after is None
    assert topology.one_peer_symmetric_exponential(4).exact_after == 2
    assert topology.complete(5).lazy(0.5).exact_after is None


# EquiTopo ----------------------------------------------------------------------------------------


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


# What the documentation says ---------------------------------------------------------------------


def noise(net: Topology) -> float:
    """Disagreement per node, root mean square over a period, with unit noise before each mixing."""
    n, period = net.num_nodes, net.period or 3000
    covariance, left = np.zeros((n, n)), []
    for k in range(period * math.ceil(400 / period)):
        W = net.rule(k if net.period is None else k % period).dense()
        covariance = W @ (covariance + np.eye(n) - 1 / n) @ W.T
        left.append(np.trace(covariance) / n)
    return math.sqrt(np.mean(left[-period if net.period else 100 :]))


@cache
def documented(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the name in their first column. The numbers are
    computed when the site is built."""
    if heading == "In numbers":
        table = runpy.run_path(str(ROOT / "scripts" / "site.py"))["numbers"]()
    else:
        table = DOCS.read_text().split(f"## {heading}\n")[1].split("\n\n|")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_documentation_lists_every_topology() -> None:
    assert documented("All of them").keys() == documented("In numbers").keys() == TOPOLOGIES.keys()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_documented_numbers_are_right(name: str) -> None:
    row = documented("In numbers")[name]
    for n, (messages, mixing, remains, grows) in ((12, row[:4]), (16, row[4:])):
        if messages == "-":
            with pytest.raises(ValueError, match="power of two"):
                TOPOLOGIES[name](n)
            continue
        net = TOPOLOGIES[name](n)
        steps = net.period or 400
        sent = np.mean([net.messages(k).double().mean().item() for k in range(steps)])
        assert float(messages) == pytest.approx(sent, abs=0.02)
        if net.exact_after is not None:
            assert mixing == f"exact in {net.exact_after}"
        else:
            assert float(mixing) == pytest.approx(net.rho, abs=0.0051)
        assert float(remains) == pytest.approx(noise(net), abs=0.0051 if net.period else 0.03)
        assert (grows == "-") == (not net.symmetric)
        if net.symmetric and n == 12:
            assert float(grows) == pytest.approx(growth("decentlam", net, 0.9), abs=0.015)


def test_decentlam_is_stable_on_two_commuting_averages() -> None:
    """Off the average they keep 1, 0 | 0, 1 | 0, 0 in turn; each pair of steps has |z| = beta."""
    for name, n in (("base-4", 16), ("base-5", 20), ("one-peer-hyper-cuboid", 15)):
        net = TOPOLOGIES[name](n)
        assert net.period == 2
        for beta in (0.5, 0.9, 0.99):
            assert growth("decentlam", net, beta) == pytest.approx(beta**0.5, rel=0.01)


# Many nodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["one-peer-hyper-cuboid", "base-2", "base-5", "equitopo-one-peer", "equitopo-static"]
)
def test_a_thousand_nodes_are_quick_and_never_dense(name: str, monkeypatch) -> None:
    monkeypatch.setattr(SparseWeights, "dense", None)
    start = time.process_time()
    for n in (1000, 1023, 1024):
        net = TOPOLOGIES[name](n)
        for k in range(20):
            net.row(5, k), net.neighbors(7, k), net.messages(k)
        assert net.symmetric and net.doubly_stochastic and net.max_peers < 40
        assert net.rho == 0 if name.startswith(("one", "base")) else net.rho < 0.75
    assert time.process_time() - start < 5


# Real processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("base-2", 5), pytest.param("one-peer-hyper-cuboid", 6, marks=pytest.mark.slow)],
)
def test_processes_equal_simulator_on_exact_networks(name: str, nodes: int) -> None:
    steps, momentum = 12, 0.3
    options = {"topology": name, "momentum": momentum, "bucket_bytes": 100}
    scenario = (name, runs.train_quadratic, {"method": "dmsgd", "steps": steps, "options": options})
    everyone = runs.run_processes(runs.run_scenarios, nodes, ([scenario],))
    trajectories = runs.outcomes(everyone, name)
    expected = runs.simulate_quadratic("dmsgd", name, nodes, steps, momentum=momentum)
    runs.assert_equal(trajectories, expected)
