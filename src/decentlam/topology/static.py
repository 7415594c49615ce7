"""Networks that stay the same at every step: ring, mesh, star, complete, hypercube, exponential."""

from __future__ import annotations

from functools import partial

import numpy as np

from decentlam.topology.base import Topology, check_num_nodes
from decentlam.topology.weights import SparseWeights, metropolis_hastings, shifts


def ring(n: int) -> Topology:
    """Each node averages with the node before and the node after it. Two nodes share one edge.

    >>> round(ring(8).rho, 6)  # (1 + 2 cos(2 pi / 8)) / 3
    0.804738
    """
    n = check_num_nodes(n, "ring")
    return graph("ring", _hops(n, [1]), "each node and its 2 neighbors", n)


def mesh(n: int, torus: bool = False) -> Topology:
    """A 2-D grid of the two closest factors of n: 8 is 2 x 4, a prime number is a line.

    `torus` joins opposite borders.
    """
    n = check_num_nodes(n, "mesh")
    height = next(h for h in range(int(n**0.5), 0, -1) if n % h == 0)
    width = n // height
    grid = np.arange(n).reshape(height, width)
    down, right = (np.stack([grid, np.roll(grid, -1, axis)], 2) for axis in (0, 1))
    if not torus:
        down, right = down[:-1], right[:, :-1]
    edges = np.concatenate([down.reshape(-1, 2), right.reshape(-1, 2)])
    name = "torus" if torus else "mesh"
    return graph(name, edges, f"{height} x {width} {'torus' if torus else 'grid'}", n)


def torus(n: int) -> Topology:
    """A mesh whose opposite borders are joined."""
    return mesh(n, torus=True)


def star(n: int) -> Topology:
    """Node 0 averages with all others; they average with node 0 only."""
    n = check_num_nodes(n, "star")
    leaves = np.arange(1, n)
    return graph("star", np.stack([np.zeros_like(leaves), leaves], 1), "node 0 in the middle", n)


def complete(n: int) -> Topology:
    """All nodes average with all others: the exact average in every step."""
    n = check_num_nodes(n, "complete", most=5_000)  # n^2 weights are held in memory
    return graph("complete", np.stack(np.triu_indices(n, 1), 1), "exact average every step", n)


def hypercube(n: int) -> Topology:
    """Nodes average if their numbers differ in one binary digit. n must be a power of two."""
    n = check_num_nodes(n, "hypercube")
    dimension = hypercube_dimension(n, "hypercube")
    nodes, bits = np.divmod(np.arange(n * dimension), max(1, dimension))
    edges = np.stack([nodes, nodes ^ (1 << bits)], 1)
    return graph("hypercube", edges, f"{dimension} neighbors each", n)


def symmetric_exponential(n: int) -> Topology:
    """Odd node i averages with the even nodes i + 1, i + 3, i + 7, ... (mod n) in every step.

    The hops are 2^k - 1 for k = 1 .. floor(log2(n - 1)), at least two so that n = 4 is connected
    (the formula in the paper's appendix has misprints). If n is odd, every node i averages with
    i +- 1, i +- 3, i +- 7, ...
    """
    n = check_num_nodes(n, "symmetric_exponential")
    edges = _hops(n, exponential_hops(n), of=slice(1, None, 2) if n % 2 == 0 else slice(None))
    what = "odd i with even i + 2^k - 1" if n % 2 == 0 else "odd n: every i with i +- (2^k - 1)"
    return graph("symmetric-exponential", edges, what, n)


def exponential(n: int) -> Topology:
    """Node i receives from i - 1, i - 2, i - 4, ... (mod n) with equal weights: directed."""
    n = check_num_nodes(n, "exponential")
    hops = [0] + [-(2**k) for k in range((n - 1).bit_length())]
    weights = shifts(n, hops, [1.0 / len(hops)] * len(hops))
    return constant("exponential", weights, "hears i - 2^k (directed)")


def exponential_hops(n: int) -> list[int]:
    """Hops 2^k - 1 of the symmetric exponential graph."""
    if n < 3:
        return [1][: n - 1]
    largest = max(2, (n - 1).bit_length() - 1)  # floor(log2(n - 1)); n = 4 needs 2 to connect
    return sorted({(2**k - 1) % n for k in range(1, largest + 1)} - {0})


def hypercube_dimension(n: int, name: str) -> int:
    if n & (n - 1):
        lower = 1 << (n.bit_length() - 1)
        raise ValueError(
            f"{name} needs a power of two nodes, got {n}; use {lower} or {2 * lower} nodes, or "
            "symmetric-exponential or base-2, which take any number"
        )
    return n.bit_length() - 1


def constant(name: str, weights: SparseWeights, description: str = "") -> Topology:
    """A topology with the same weights at every step."""
    return Topology(name, weights.num_nodes, 1, partial(_same, weights), description)


def _same(weights: SparseWeights, step: int) -> SparseWeights:
    return weights


def graph(name: str, edges: np.ndarray, description: str, n: int) -> Topology:
    """Metropolis-Hastings weights on the edges, (m, 2), each taken once and without loops."""
    edges = np.sort(edges[edges[:, 0] != edges[:, 1]], axis=1)
    return constant(name, metropolis_hastings(n, np.unique(edges, axis=0)), description)


def _hops(n: int, hops: list[int], of: slice = slice(None)) -> np.ndarray:
    """Edges from these nodes, by default all, to those so many further on, (m, 2)."""
    start = np.arange(n)[of]
    far = (start + np.array(hops, dtype=np.int64)[:, None]) % n
    return np.stack([np.broadcast_to(start, far.shape), far], 2).reshape(-1, 2)
