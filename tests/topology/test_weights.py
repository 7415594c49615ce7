"""Sparse weights: how they are put together, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from decentlam.topology import SparseWeights
from decentlam.topology.weights import pairs, symmetric_weights


@pytest.mark.parametrize("n", [1, 2, 5, 8, 33])
def test_pairs_are_the_symmetric_weights_of_their_edges_to_the_bit(n: int) -> None:
    order = np.random.default_rng(n).permutation(n)
    for count in range(n // 2 + 1):
        left, right = order[:count], order[count : 2 * count]
        found = pairs(n, left, right)
        expected = symmetric_weights(n, left, right, np.full(count, 0.5))
        for name in ("starts", "columns", "values"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), (count, name)


def test_entries_of_the_same_place_are_added() -> None:
    rows, columns = np.array([1, 0, 1, 0]), np.array([0, 1, 0, 0])
    found = SparseWeights.from_entries(2, rows, columns, np.array([0.25, 0.5, 0.75, 0.5]))
    np.testing.assert_array_equal(found.dense(), [[0.5, 0.5], [1.0, 0.0]])
    assert found.starts.tolist() == [0, 2, 3] and found.columns.tolist() == [0, 1, 0]
