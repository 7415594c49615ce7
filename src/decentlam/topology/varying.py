"""Networks that change with the step: each node talks to at most one other per step."""

from __future__ import annotations

from functools import partial
from math import lcm

import numpy as np

from decentlam.topology.base import Topology
from decentlam.topology.check import check_num_nodes, check_seed
from decentlam.topology.static import exponential_hops, hypercube_dimension
from decentlam.topology.weights import SparseWeights, pairs, shifts


def bipartite_random_match(n: int, seed: int = 0) -> Topology:
    """At every step the nodes are split at random into pairs, and each pair averages.

    The pairs depend on (seed, step) alone, so that all nodes draw the same ones without talking.
    For odd n one node rests.
    """
    n = check_num_nodes(n, "bipartite_random_match")
    return Topology(
        "bipartite-random-match",
        n,
        None,
        partial(_random_pairs, n, check_seed(seed)),
        "random pairs",
        # The mean over all pairings of even n is (11' - I) / (n - 1); for odd n one node rests.
        pairing=-1.0 / (n - 1) if n % 2 == 0 else 0.0,
    )


def one_peer_exponential(n: int) -> Topology:
    """Step k: node i averages with what it hears from i - 2^k (mod n): directed, one message.

    When n is a power of two, log2(n) steps average exactly.
    """
    n = check_num_nodes(n, "one_peer_exponential")
    period = max(1, (n - 1).bit_length())
    return Topology(
        "one-peer-exponential", n, period, partial(_one_hop, n), "hears i - 2^k at step k"
    )


def one_peer_symmetric_exponential(n: int) -> Topology:
    """The symmetric exponential graph one matching at a time: odd i with even i + 2^k - 1.

    For odd n the nodes rest one after the other, and the others are paired as if they were alone.
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
    """Step k: nodes whose numbers differ in binary digit k average; n must be a power of two.

    log2(n) steps average exactly.
    """
    n = check_num_nodes(n, "one_peer_hypercube")
    dimension = hypercube_dimension(n, "one_peer_hypercube")
    return Topology(
        "one-peer-hypercube", n, max(1, dimension), partial(_across_bit, n), "across bit k"
    )


def _random_pairs(n: int, seed: int, step: int) -> SparseWeights:
    order = np.random.default_rng([seed, step]).permutation(n)
    return pairs(n, order[: n // 2], order[n // 2 : 2 * (n // 2)])


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
