"""One weight matrix W in compressed-row form, and how edges, pairs or hops become one.

n rows, never a dense n x n unless you ask; rows and columns sum to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SparseWeights:
    """W by rows: row i holds what node i keeps of itself and takes from the nodes it hears."""

    starts: np.ndarray  # (n + 1,) row i occupies starts[i]:starts[i + 1]
    columns: np.ndarray  # (nnz,) ascending inside a row
    values: np.ndarray  # (nnz,) float64

    @classmethod
    def from_entries(
        cls, n: int, rows: np.ndarray, columns: np.ndarray, values: np.ndarray
    ) -> SparseWeights:
        """Sorts the entries by row and column; entries of the same place are added."""
        keys = rows.astype(np.int64) * n + columns
        order = np.argsort(keys, kind="stable")
        places = keys[order]
        summed: np.ndarray = values[order].astype(np.float64)
        if (places[1:] == places[:-1]).any():
            places, where = np.unique(keys, return_inverse=True)
            summed = np.bincount(where, weights=values, minlength=len(places))
        counts = np.bincount(places // n, minlength=n)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return cls(starts, places % n, summed)

    @classmethod
    def from_dense(cls, matrix: np.ndarray) -> SparseWeights:
        rows, columns = np.nonzero(matrix)
        return cls.from_entries(len(matrix), rows, columns, matrix[rows, columns])

    @property
    def num_nodes(self) -> int:
        return len(self.starts) - 1

    @property
    def rows(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_nodes), np.diff(self.starts))

    def row(self, rank: int) -> dict[int, float]:
        """Weights of one row, own weight included, as {rank: weight}."""
        span = slice(self.starts[rank], self.starts[rank + 1])
        return dict(zip(self.columns[span].tolist(), self.values[span].tolist(), strict=True))

    def transpose(self) -> SparseWeights:
        return self.from_entries(self.num_nodes, self.columns, self.rows, self.values)

    def lazy(self, rate: float) -> SparseWeights:
        """(1 - rate) I + rate W."""
        n = self.num_nodes
        nodes = np.arange(n)
        return self.from_entries(
            n,
            np.concatenate([self.rows, nodes]),
            np.concatenate([self.columns, nodes]),
            np.concatenate([rate * self.values, np.full(n, 1.0 - rate)]),
        )

    def apply(self, x: np.ndarray) -> np.ndarray:
        """W x for x of (n, anything); every row of W must have an entry, as mixing weights do."""
        return np.add.reduceat(self.values[:, None] * x[self.columns], self.starts[:-1], axis=0)

    def dense(self) -> np.ndarray:
        matrix = np.zeros((self.num_nodes, self.num_nodes))
        matrix[self.rows, self.columns] = self.values
        return matrix

    def csr(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The same matrix as a torch CSR tensor, for mixing many nodes at once."""
        return torch.sparse_csr_tensor(
            torch.from_numpy(self.starts),
            torch.from_numpy(self.columns),
            torch.from_numpy(self.values).to(dtype),
            size=(self.num_nodes, self.num_nodes),
            device=device,
            check_invariants=False,
        )

    def same_as(self, other: SparseWeights, tolerance: float = 1e-12) -> bool:
        return bool(
            np.array_equal(self.starts, other.starts)
            and np.array_equal(self.columns, other.columns)
            and np.allclose(self.values, other.values, rtol=0, atol=tolerance)
        )


def metropolis_hastings(n: int, edges: np.ndarray) -> SparseWeights:
    """w_ij = 1 / (1 + max(deg_i, deg_j)), w_ii = 1 - the rest (Sayed 2014, Table 14.1)."""
    i, j = edges.T
    degree = np.bincount(edges.ravel(), minlength=n)
    return symmetric_weights(n, i, j, 1.0 / (1 + np.maximum(degree[i], degree[j])))


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
    """W = 1/2 for both of a pair; whoever has no partner keeps its own model.

    What `symmetric_weights` returns for them, without sorting: networks that change draw anew at
    every step.
    """
    nodes = np.arange(n)
    partner = nodes.copy()
    partner[left], partner[right] = right, left
    paired = partner != nodes
    columns = np.stack([np.minimum(nodes, partner), np.maximum(nodes, partner)], axis=1)
    if paired.all():
        return SparseWeights(np.arange(0, 2 * n + 1, 2), columns.ravel(), np.full(2 * n, 0.5))
    kept = np.stack([np.ones(n, dtype=bool), paired], axis=1)
    entries = 1 + paired
    return SparseWeights(
        np.concatenate([[0], np.cumsum(entries)]), columns[kept], np.repeat(1.0 / entries, entries)
    )
