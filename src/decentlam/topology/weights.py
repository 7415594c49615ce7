"""Weight rules: from a graph's edges to a symmetric W whose rows sum to one."""

from __future__ import annotations

import numpy as np

from decentlam.topology.sparse import SparseWeights


def metropolis_hastings(n: int, edges: np.ndarray) -> SparseWeights:
    """w_ij = 1 / (1 + max(deg_i, deg_j)), w_ii = 1 - the rest (Sayed 2014, Table 14.1)."""
    i, j = _ends(edges)
    degree = np.bincount(np.concatenate([i, j]), minlength=n)
    return symmetric_weights(n, i, j, 1.0 / (1 + np.maximum(degree[i], degree[j])))


def uniform(n: int, edges: np.ndarray) -> SparseWeights:
    """w_ij = 1 / (1 + deg): every node averages its neighborhood evenly.

    Symmetric only when all degrees are equal; other graphs are refused.
    """
    i, j = _ends(edges)
    degree = np.bincount(np.concatenate([i, j]), minlength=n)
    if n > 1 and degree.min() != degree.max():
        raise ValueError(
            "uniform weights 1 / (1 + degree) are symmetric only if every node has the same "
            f"degree, and here degrees run from {degree.min()} to {degree.max()}. Try the rule "
            "'metropolis-hastings', which is symmetric on every graph."
        )
    return symmetric_weights(n, i, j, 1.0 / (1 + degree[i]))


WEIGHT_RULES = {"metropolis-hastings": metropolis_hastings, "uniform": uniform}


def _ends(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    edges = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]


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
