"""Networks that stay the same at every step: ring, mesh, star, complete, hypercube, exponential."""

from __future__ import annotations

from functools import partial

import numpy as np

from decentlam.topology.base import Topology
from decentlam.topology.check import check_num_nodes
from decentlam.topology.sparse import SparseWeights
from decentlam.topology.weights import metropolis_hastings


def ring(n: int) -> Topology:
    """Every node talks to the one before and the one after it; two nodes share one edge.

    >>> round(ring(8).rho, 6)  # (1 + 2 cos(2 pi / 8)) / 3
    0.804738
    """
    n = check_num_nodes(n, "ring")
    nodes = np.arange(n)
    return _graph("ring", n, np.stack([nodes, (nodes + 1) % n], 1), "each node and its 2 neighbors")


def mesh(n: int, torus: bool = False) -> Topology:
    """A 2-D grid of the two closest factors of n (8 is 2 x 4; a prime is a line).

    `torus` joins the opposite borders.
    """
    n = check_num_nodes(n, "mesh")
    height = next(h for h in range(int(n**0.5), 0, -1) if n % h == 0)
    width = n // height
    row, column = np.divmod(np.arange(n), width)
    right = _linked(row, column, row, column + 1, height, width, torus)
    down = _linked(row, column, row + 1, column, height, width, torus)
    shape = f"{height} x {width} {'torus' if torus else 'grid'}"
    return _graph("torus" if torus else "mesh", n, np.concatenate([right, down]), shape)


def torus(n: int) -> Topology:
    """The mesh with its opposite borders joined."""
    return mesh(n, torus=True)


def star(n: int) -> Topology:
    """Node 0 talks to everybody, everybody only to node 0."""
    n = check_num_nodes(n, "star")
    leaves = np.arange(1, n)
    return _graph("star", n, np.stack([np.zeros_like(leaves), leaves], 1), "node 0 in the middle")


def complete(n: int) -> Topology:
    """Everybody talks to everybody: W is the exact average."""
    n = check_num_nodes(n, "complete")
    return _graph("complete", n, np.stack(np.triu_indices(n, 1), 1), "exact average every step")


def hypercube(n: int) -> Topology:
    """Nodes whose numbers differ in one binary digit talk; n must be a power of two."""
    n = check_num_nodes(n, "hypercube")
    dimension = hypercube_dimension(n, "hypercube")
    nodes = np.arange(n)
    edges = [np.stack([nodes, nodes ^ (1 << bit)], 1) for bit in range(dimension)]
    return _graph("hypercube", n, _join(edges), f"{dimension} neighbors each")


def symmetric_exponential(n: int) -> Topology:
    """Odd node i talks to the even nodes i + 1, i + 3, i + 7, ... (mod n) at every step.

    The paper's appendix lists hops 2^k - 1 with misprints in its first and last term; this is
    k = 1 .. floor(log2(n - 1)), at least two hops so that n = 4 is connected. Odd n has no such
    two-sided split: there every node i talks to i +- 1, i +- 3, i +- 7, ...
    """
    n = check_num_nodes(n, "symmetric_exponential")
    start = np.arange(1, n, 2) if n % 2 == 0 else np.arange(n)
    edges = [np.stack([start, (start + hop) % n], 1) for hop in exponential_hops(n)]
    what = "odd i with even i + 2^k - 1" if n % 2 == 0 else "odd n: every i with i +- (2^k - 1)"
    return _graph("symmetric-exponential", n, _join(edges), what)


def bluefog_symmetric_exponential(n: int) -> Topology:
    """BlueFog's reading of the same name: i talks to i +- 4^k (mod n); for comparison."""
    n = check_num_nodes(n, "bluefog_symmetric_exponential")
    nodes = np.arange(n)
    hops = [4**k for k in range(n) if 4**k <= n // 2] if n > 1 else []
    edges = [np.stack([nodes, (nodes + hop) % n], 1) for hop in hops]
    return _graph("bluefog-symmetric-exponential", n, _join(edges), "i with i +- 4^k")


def exponential(n: int) -> Topology:
    """Every node hears i - 1, i - 2, i - 4, ... (mod n) with equal weights: directed."""
    n = check_num_nodes(n, "exponential")
    hops = [0] + [2**k for k in range(max(n - 1, 0).bit_length())]
    nodes = np.arange(n)
    weights = SparseWeights.from_entries(
        n,
        np.tile(nodes, len(hops)),
        np.concatenate([(nodes - hop) % n for hop in hops]),
        np.full(n * len(hops), 1.0 / len(hops)),
    )
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
            "symmetric-exponential or one-peer-hyper-cuboid, which take any number"
        )
    return n.bit_length() - 1


def constant(name: str, weights: SparseWeights, description: str = "") -> Topology:
    """A topology with the same weights at every step."""
    return Topology(name, weights.num_nodes, 1, partial(_same, weights), description)


def _same(weights: SparseWeights, step: int) -> SparseWeights:
    return weights


def _graph(name: str, n: int, edges: np.ndarray, description: str) -> Topology:
    """Metropolis-Hastings weights on the edges, each taken once and without loops."""
    edges = np.sort(edges[edges[:, 0] != edges[:, 1]], axis=1)
    return constant(name, metropolis_hastings(n, np.unique(edges, axis=0)), description)


def _join(edges: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*edges, np.empty((0, 2), dtype=np.int64)])


def _linked(
    row: np.ndarray,
    column: np.ndarray,
    next_row: np.ndarray,
    next_column: np.ndarray,
    height: int,
    width: int,
    wrap: bool,
) -> np.ndarray:
    """Edges from each grid place to the next one, across the border only when `wrap`."""
    inside = (next_row < height) & (next_column < width)
    edges = np.stack(
        [row * width + column, (next_row % height) * width + next_column % width], axis=1
    )
    return edges if wrap else edges[inside]
