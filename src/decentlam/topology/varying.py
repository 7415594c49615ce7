"""Networks that change with the step: each node talks to one other per step, or to two."""

from __future__ import annotations

from functools import partial
from math import lcm

import numpy as np

from decentlam.topology.base import Topology, check_num_nodes
from decentlam.topology.static import exponential_hops, hypercube_dimension
from decentlam.topology.weights import SparseWeights, pairs, shifts


def bipartite_random_match(n: int, seed: int = 0) -> Topology:
    """Random pairs average, new ones in every step. This is the default topology.

    The pairs depend only on (seed, step), so all nodes draw the same ones. If n is odd, one node
    rests.
    """
    n = check_num_nodes(n, "bipartite_random_match")
    return Topology(
        "bipartite-random-match",
        n,
        None,
        partial(_random_pairs, n, _check_seed(seed)),
        "random pairs",
        pairing=_mean_pairing(n),
    )


def two_random_matches(n: int, seed: int = 0) -> Topology:
    """Each node averages with two random peers in every step, with weights of a third.

    If both peers are the same node, its weight is two thirds. If n is odd, a node that rests keeps
    that third itself. In 16 bits the two messages have the bytes of one.
    """
    n = check_num_nodes(n, "two_random_matches")
    return Topology(
        "two-random-matches",
        n,
        None,
        partial(_two_random_pairings, n, _check_seed(seed)),
        "two random pairings at once",
        pairing=_mean_pairing(n),
        pairings=2,
    )


def one_peer_exponential(n: int) -> Topology:
    """Node i receives from i - 2^k (mod n) in step k: directed, one message.

    If n is a power of two, log2(n) steps give the exact average.
    """
    n = check_num_nodes(n, "one_peer_exponential")
    period = max(1, (n - 1).bit_length())
    return Topology(
        "one-peer-exponential", n, period, partial(_one_hop, n), "hears i - 2^k at step k"
    )


def one_peer_symmetric_exponential(n: int) -> Topology:
    """Odd node i averages with even node i + 2^k - 1 (mod n) in step k.

    If n is odd, the nodes take turns to rest, and the others are paired as if they were alone.
    """
    n = check_num_nodes(n, "one_peer_symmetric_exponential")
    hops = exponential_hops(max(2, n - n % 2))
    period = len(hops) if n % 2 == 0 else lcm(n, len(hops))
    return Topology(
        "one-peer-symmetric-exponential",
        n,
        period,
        partial(_exponential_pairs, n, tuple(hops)),
        "odd i with even i + 2^k - 1, one k per step",
    )


def one_peer_hypercube(n: int) -> Topology:
    """Nodes whose numbers differ in binary digit k average in step k.

    n must be a power of two. log2(n) steps give the exact average.
    """
    n = check_num_nodes(n, "one_peer_hypercube")
    dimension = hypercube_dimension(n, "one_peer_hypercube")
    return Topology(
        "one-peer-hypercube", n, max(1, dimension), partial(_across_bit, n), "across bit k"
    )


def _random_pairs(n: int, seed: int, step: int) -> SparseWeights:
    order = np.random.default_rng([seed, step]).permutation(n)
    return pairs(n, order[: n // 2], order[n // 2 : 2 * (n // 2)])


def _two_random_pairings(n: int, seed: int, step: int) -> SparseWeights:
    draw, nodes, half = np.random.default_rng([seed, step]), np.arange(n), n // 2
    columns = [nodes]
    for _ in range(2):
        order, partner = draw.permutation(n), nodes.copy()
        left, right = order[:half], order[half : 2 * half]
        partner[left], partner[right] = right, left
        columns.append(partner)
    return SparseWeights.from_entries(
        n, np.tile(nodes, 3), np.concatenate(columns), np.full(3 * n, 1 / 3)
    )


def _mean_pairing(n: int) -> float:
    """Return the eigenvalue, off the average, of the mean over all pairings.

    For even n the mean is (11' - I) / (n - 1), for odd n, where one node rests, 11' / n.
    """
    return -1.0 / (n - 1) if n % 2 == 0 else 0.0


def _exponential_pairs(n: int, hops: tuple[int, ...], step: int) -> SparseWeights:
    awake = np.delete(np.arange(n), step % n) if n % 2 else np.arange(n)
    odd = np.arange(1, len(awake), 2)
    return pairs(n, awake[odd], awake[(odd + hops[step % len(hops)]) % len(awake)])


def _across_bit(n: int, step: int) -> SparseWeights:
    nodes = np.arange(n)
    partner = nodes ^ (1 << step) if n > 1 else nodes
    return pairs(n, nodes[nodes < partner], partner[nodes < partner])


def _one_hop(n: int, step: int) -> SparseWeights:
    return shifts(n, [0, -(2**step)], [0.5, 0.5])


def _check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of 0 or more, got {seed!r}")
    return seed
