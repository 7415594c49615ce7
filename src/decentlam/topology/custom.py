"""The user's own network, from a weight matrix or from edges, checked before use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from decentlam.topology.base import Topology, check_num_nodes
from decentlam.topology.static import constant, graph
from decentlam.topology.weights import SparseWeights


def from_weights(W: Tensor | np.ndarray | list[list[float]], directed: bool = False) -> Topology:
    """A static network with the given (n, n) weights.

    W must be finite, non-negative, connected, symmetric, with rows that sum to one;
    `directed=True` lifts symmetry and asks for columns that sum to one instead.

    >>> from_weights([[0.5, 0.5], [0.5, 0.5]]).rho
    0.0
    """
    if not isinstance(directed, bool):
        raise TypeError(f"from_weights: directed must be True or False, got {directed!r}")
    raw = W.detach().cpu().numpy() if isinstance(W, torch.Tensor) else W
    try:
        if np.iscomplexobj(raw):
            raise TypeError("real numbers are needed, not complex ones")
        matrix = np.asarray(raw, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"from_weights needs a square matrix of numbers: {error}") from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"from_weights needs a square (n, n) matrix, got shape {matrix.shape}")
    weights = SparseWeights.from_dense(matrix)
    _check_weights(weights, directed)
    if not directed:  # checked to 1e-9; from here on to the last bit
        weights = SparseWeights.from_dense((matrix + matrix.T) / 2)
    return constant("from_weights", weights, "given weights")


def from_edges(n: int, edges: Iterable[tuple[int, int]]) -> Topology:
    """A static network with the given undirected edges and Metropolis-Hastings weights.

    >>> from_edges(3, [(0, 1), (1, 2)]).neighbors(1)
    [0, 2]
    """
    n = check_num_nodes(n, "from_edges")
    try:
        pairs = [tuple(edge) for edge in edges]
    except TypeError:
        raise TypeError(
            f"from_edges: edges must be pairs of node numbers, such as [(0, 1), (1, 2)], "
            f"got {edges!r}"
        ) from None
    for edge in pairs:
        if len(edge) != 2 or not all(isinstance(i, int | np.integer) for i in edge):
            raise ValueError(f"an edge is a pair of node numbers, got {edge!r}")
        if not all(0 <= i < n for i in edge):
            raise ValueError(f"edge {edge} leaves the nodes 0 to {n - 1}; raise n or drop the edge")
        if edge[0] == edge[1]:
            raise ValueError(
                f"edge {edge} joins a node to itself; leave it out, every node keeps its own share"
            )
    given = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    network = graph("from_edges", given, "given edges", n)
    _check_mixing(network.sparse(), "from_edges")
    return network


def _check_weights(w: SparseWeights, directed: bool) -> None:
    """Refuses weights that are not finite, stochastic, symmetric (unless `directed`), connected."""
    if not np.isfinite(w.values).all():
        raise ValueError("from_weights: every weight must be finite; there are NaN or infinity")
    if (w.values < 0).any():
        worst = int(np.argmin(w.values))
        raise ValueError(
            f"from_weights: weight [{w.rows[worst]}, {w.columns[worst]}] is {w.values[worst]:g}; "
            "weights must not be negative. Try from_edges, which computes Metropolis-Hastings "
            "weights."
        )
    for name, side in (("row", w.rows), ("column", w.columns)):
        sums = np.bincount(side, w.values, w.num_nodes)
        worst = int(np.abs(sums - 1).argmax())
        if not np.isclose(sums[worst], 1, rtol=0, atol=1e-9):
            raise ValueError(
                f"from_weights: {name} {worst} of the weights sums to {sums[worst]:.10g}; every "
                "row and column must sum to 1 within 1e-9 (compute W in float64), or mixing would "
                "shift the average. Use from_edges for such weights on any graph."
            )
    if not directed and not w.same_as(w.transpose(), 1e-9):
        matrix = w.dense()
        i, j = np.unravel_index(np.abs(matrix - matrix.T).argmax(), matrix.shape)
        raise ValueError(
            f"from_weights: the weights are not symmetric: w[{i}, {j}] = {matrix[i, j]:g} but "
            f"w[{j}, {i}] = {matrix[j, i]:g}. Use from_edges (Metropolis-Hastings weights "
            "are symmetric on every graph), or directed=True if the directions are meant."
        )
    _check_mixing(w, "from_weights")


def _check_mixing(w: SparseWeights, name: str) -> None:
    """Refuses stochastic weights that never average: parts apart, or models that only go round."""
    distance = _distances(w)
    if (distance < 0).any():
        apart = np.flatnonzero(distance < 0)
        shown = ", ".join(map(str, apart[:8])) + (", ..." if len(apart) > 8 else "")
        raise ValueError(
            f"{name}: the network is disconnected: node 0 never reaches {shown}. Add edges that "
            "join the parts; ring(n) is the sparsest connected choice with equal degrees."
        )
    # The greatest common divisor of the lengths of all closed walks; 2 for a bipartite graph, 1
    # where a node keeps a share of its own, and then no |eigenvalue| but the average's is 1.
    period = int(np.gcd.reduce(distance[w.rows] + 1 - distance[w.columns]))
    if period > 1:
        raise ValueError(
            f"{name}: no node keeps a share of its own model and every way round the graph takes a "
            f"multiple of {period} steps, so the models would go round for ever without averaging. "
            "Give every node a self weight, for example (W + I) / 2."
        )


def _distances(w: SparseWeights) -> np.ndarray:
    """Return in how many steps node 0 hears of each node, (n,); -1: never, in any direction."""
    distance, steps, rows = np.full(w.num_nodes, -1), 0, w.rows
    distance[0] = 0
    while True:
        heard = w.columns[(distance == steps)[rows]]
        new = heard[distance[heard] < 0]
        if not len(new):
            return distance
        steps += 1
        distance[new] = steps
