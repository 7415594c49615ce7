"""EquiTopo (Song et al., 2022): random hops that agree at a rate independent of n."""

from __future__ import annotations

from functools import partial

import numpy as np

from decentlam.topology.base import Topology
from decentlam.topology.check import check_num_nodes, check_seed
from decentlam.topology.static import constant
from decentlam.topology.weights import SparseWeights, pairs, shifts

_DRAWS = 32  # of the static graph's hops; the best is kept


def equitopo_one_peer(n: int, seed: int = 0) -> Topology:
    """Return a network whose node i averages with i + u or i - u (mod n), u drawn at every step.

    OU-EquiDyn of Song, Li, Jin, Shi, Yan, Yin, Yuan: Communication-Efficient Topologies for
    Decentralized Learning with O(1) Consensus Rate, 2022. Hop u splits the nodes into gcd(u, n)
    cycles; each is cut into pairs from a random start, and if its length is odd, one of its nodes
    rests. (The paper's scan leaves more nodes resting and weighs a partner eta (n - 1) / n; pairs
    that average evenly are its eta = n / (2 n - 2).) The draw depends on (seed, step) alone.
    """
    n = check_num_nodes(n, "equitopo_one_peer")
    return Topology(
        "equitopo-one-peer",
        n,
        None,
        partial(_pairs_of_a_hop, n, check_seed(seed)),
        "pairs along a random hop",
        pairing=_mean_swap(n),
    )


def equitopo_static(n: int, hops: int | None = None, seed: int = 0) -> Topology:
    """Node i talks to i +- u (mod n) for some random hops u, the same at every step.

    U-EquiStatic of the same paper: the mean over the hops of (1/n) I + (1 - 1/n) (shifts by +u and
    -u). `hops` is log2(n), rounded up, by default, for about twice as many peers; the best of 32
    draws is kept. With all n - 1 hops, as for n up to 3, it averages exactly.
    """
    n = check_num_nodes(n, "equitopo_static")
    number = (n - 1).bit_length() if hops is None else hops
    if isinstance(number, bool) or not isinstance(number, int) or number < min(1, n - 1):
        raise ValueError(f"hops must be a whole number of 1 or more, got {hops!r}; try log2(n)")
    number = min(number, n - 1)
    if n == 1:
        return constant("equitopo-static", SparseWeights.from_dense(np.ones((1, 1))), "no hops")
    random = np.random.default_rng(check_seed(seed))
    drawn = (1 + random.permutation(n - 1)[:number] for _ in range(_DRAWS))
    hop = min(drawn, key=partial(_largest_eigenvalue, n))
    both = [*hop, *-hop]
    weights = shifts(n, [0, *both], [1 / n, *[(1 - 1 / n) / len(both)] * len(both)])
    shown = ", ".join(map(str, np.unique(np.minimum(hop, n - hop))))
    return constant("equitopo-static", weights, f"i with i +- {shown}")


def _pairs_of_a_hop(n: int, seed: int, step: int) -> SparseWeights:
    if n == 1:
        return pairs(1, np.empty(0, int), np.empty(0, int))
    random = np.random.default_rng([seed, step])
    hop = int(random.integers(1, n))
    cycles = int(np.gcd(hop, n))
    length = n // cycles
    start = random.integers(0, length, cycles)[:, None]
    left = start + 2 * np.arange(length // 2)
    cycle = np.arange(cycles)[:, None]
    return pairs(n, ((cycle + hop * left) % n).ravel(), ((cycle + hop * (left + 1)) % n).ravel())


def _mean_swap(n: int) -> float:
    """Largest eigenvalue, off the average, of the mean of the permutations that swap the pairs."""
    if n == 1:
        return 0.0
    hop = np.arange(1, n)
    length = n // np.gcd(hop, n)
    side = (length // 2) / length / (n - 1)  # the chance of a pair with i + u, and with i - u
    row = np.zeros(n)
    row[hop] = side + side[::-1]
    row[0] = 1 - row.sum()
    return float(np.fft.fft(row).real[1:].max())


def _largest_eigenvalue(n: int, hop: np.ndarray) -> float:
    """rho of the static graph with these hops."""
    frequency = np.arange(1, n)[:, None]
    values = 1 / n + (1 - 1 / n) * np.cos(2 * np.pi * frequency * hop / n).mean(1)
    return float(np.abs(values).max())
