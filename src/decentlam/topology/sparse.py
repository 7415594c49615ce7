"""One weight matrix W in compressed-row form: n rows, never a dense n x n unless you ask."""

from __future__ import annotations

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
