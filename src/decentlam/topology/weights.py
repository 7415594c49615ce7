"""From edges, pairs or hops to a W whose rows and columns sum to one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decentlam.topology.sparse import SparseWeights


def metropolis_hastings(n: int, edges: np.ndarray) -> SparseWeights:
    """w_ij = 1 / (1 + max(deg_i, deg_j)), w_ii = 1 - the rest (Sayed 2014, Table 14.1)."""
    i, j = edges.T
    degree = np.bincount(edges.ravel(), minlength=n)
    return symmetric_weights(n, i, j, 1.0 / (1 + np.maximum(degree[i], degree[j])))


def uniform(n: int, edges: np.ndarray) -> SparseWeights:
    """w_ij = 1 / (1 + deg): every node averages its neighborhood evenly.

    Symmetric only when all degrees are equal; other graphs are refused.
    """
    degree = np.bincount(edges.ravel(), minlength=n)
    if degree.min() != degree.max():
        raise ValueError(
            "uniform weights 1 / (1 + degree) are symmetric only if every node has the same "
            f"degree, and here degrees run from {degree.min()} to {degree.max()}. Try the rule "
            "'metropolis-hastings', which is symmetric on every graph."
        )
    return metropolis_hastings(n, edges)  # max(deg_i, deg_j) is the degree


WEIGHT_RULES = {"metropolis-hastings": metropolis_hastings, "uniform": uniform}


def symmetric_weights(n: int, i: np.ndarray, j: np.ndarray, values: np.ndarray) -> SparseWeights:
    """W with w_ij = w_ji = the value of edge (i, j); every node keeps what its row lacks to 1."""
    own = 1.0 - np.bincount(np.concatenate([i, j]), np.concatenate([values, values]), n)
    own[np.abs(own) < 1e-15] = 0.0
    nodes = np.arange(n)
    return SparseWeights.from_entries(
        n,
        np.concatenate([i, j, nodes]),
        np.concatenate([j, i, nodes]),
        np.concatenate([values, values, own]),
    )


def shifts(n: int, hops: Sequence[int] | np.ndarray, shares: Sequence[float]) -> SparseWeights:
    """Every node i hears i + hop (mod n) with the share of each hop; 0 is the node itself."""
    nodes = np.arange(n)
    return SparseWeights.from_entries(
        n,
        np.tile(nodes, len(hops)),
        np.concatenate([(nodes + hop) % n for hop in hops]),
        np.repeat(shares, n),
    )


def pairs(n: int, left: np.ndarray, right: np.ndarray) -> SparseWeights:
    """W = 1/2 for both of a pair; whoever has no partner keeps its own model."""
    return symmetric_weights(n, left, right, np.full(len(left), 0.5))
