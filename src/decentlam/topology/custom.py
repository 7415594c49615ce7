"""The user's own network, from a weight matrix or from edges, checked before use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from decentlam.topology.base import Topology
from decentlam.topology.check import check_mixing, check_num_nodes, check_weights
from decentlam.topology.sparse import SparseWeights
from decentlam.topology.static import constant, graph
from decentlam.topology.weights import WEIGHT_RULES


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
    check_weights(weights, "from_weights", directed=directed)
    if not directed:  # checked to 1e-9; from here on to the last bit
        weights = SparseWeights.from_dense((matrix + matrix.T) / 2)
    return constant("from_weights", weights, "given weights")


def from_edges(
    n: int, edges: Iterable[tuple[int, int]], weights: str = "metropolis-hastings"
) -> Topology:
    """A static network with the given undirected edges and weights by the named rule.

    >>> from_edges(3, [(0, 1), (1, 2)]).neighbors(1)
    [0, 2]
    """
    n = check_num_nodes(n, "from_edges")
    if weights not in WEIGHT_RULES:
        raise ValueError(
            f"unknown weight rule {weights!r}; choose from {', '.join(sorted(WEIGHT_RULES))}"
        )
    pairs = [tuple(edge) for edge in edges]
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
    network = graph("from_edges", given, f"given edges, {weights} weights", n, weights)
    check_mixing(network.sparse(), "from_edges")
    return network
