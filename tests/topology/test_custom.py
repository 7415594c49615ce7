"""The user's own networks, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import decentlam
from decentlam import topology
from decentlam.topology import from_edges, from_weights
from tests.helpers.refusals import Refusal, assert_refused, each_refused

HALF = [[0.5, 0.5], [0.5, 0.5]]


def path(n: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(n - 1)]


def test_from_edges_takes_each_edge_once_in_any_order() -> None:
    net = from_edges(3, [(0, 1), (1, 0), (2, 1), (1, 2)])
    # degrees 1, 2, 1: both edges weigh 1/3
    np.testing.assert_allclose(net.weights() * 3, [[2, 1, 0], [1, 1, 1], [0, 1, 2]])


def test_from_edges_of_one_node_has_no_edges() -> None:
    assert from_edges(1, []).weights().tolist() == [[1.0]]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list])
def test_from_weights_takes_arrays_tensors_and_lists(kind) -> None:
    W = [[0.75, 0.25], [0.25, 0.75]]
    assert from_weights(kind(W)).weights().tolist() == W


def test_from_weights_is_symmetric_to_the_last_bit() -> None:
    """It accepts W that is symmetric to 1e-9, and DecentLaM must accept what it accepted."""
    W = topology.ring(5).weights().numpy()
    W[0, 1] += 4e-10
    W[0, 0] -= 4e-10
    net = from_weights(W)
    assert net.symmetric
    decentlam.Nodes("decentlam", net, torch.zeros(5, 1))


REFUSALS: list[Refusal] = [
    ("asymmetric", lambda: from_weights([[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0.25, 0, 0.75]]),
     ValueError,
     ["not symmetric", "w[0, 1] = 0.5", "w[1, 0] = 0.25", "from_edges", "directed=True"]),
    ("rows", lambda: from_weights([[0.5, 0.4], [0.4, 0.5]]), ValueError,
     ["row 0", "sums to 0.9", "must sum to 1", "from_edges"]),
    ("float32 thirds", lambda: from_weights(topology.ring(5).weights().float()), ValueError,
     ["row", "1.00000003", "float64"]),
    ("columns", lambda: from_weights([[0.5, 0.5], [0.25, 0.75]], directed=True), ValueError,
     ["column", "0.75", "must sum to 1", "from_edges"]),
    ("negative", lambda: from_weights([[1.5, -0.5], [-0.5, 1.5]]), ValueError,
     ["weight [0, 1]", "-0.5", "negative", "from_edges"]),
    ("NaN weight", lambda: from_weights([[math.nan, 1], [1, 0]]), ValueError,
     ["NaN", "must be finite"]),
    ("not square", lambda: from_weights(np.ones((2, 3)) / 3), ValueError,
     ["(2, 3)", "square (n, n)"]),
    ("ragged", lambda: from_weights([[1.0], [0.5, 0.5]]), ValueError, ["square matrix of numbers"]),
    ("empty", lambda: from_weights(np.empty((0, 0))), ValueError, ["(0, 0)", "square (n, n)"]),
    ("disconnected weights", lambda: from_weights(np.kron(np.eye(2), HALF)), ValueError,
     ["disconnected", "node 0 never reaches 2, 3", "Add edges", "ring"]),
    ("swapping for ever", lambda: from_weights([[0, 1], [1, 0]]), ValueError,
     ["own model", "multiple of 2", "(W + I) / 2"]),
    ("complex", lambda: from_weights(np.eye(2) * 1j), ValueError, ["real numbers", "complex"]),
    ("directed a word", lambda: from_weights(HALF, directed="no"), TypeError,
     ["directed", "True or False", "'no'"]),
    ("disconnected edges", lambda: from_edges(12, path(3)), ValueError,
     ["disconnected", "3, 4, 5, 6, 7, 8, 9, 10, ...", "Add edges"]),
    ("edge out of range", lambda: from_edges(3, [*path(3), (2, 3)]), ValueError,
     ["(2, 3)", "0 to 2", "raise n or drop"]),
    ("self loop", lambda: from_edges(3, [*path(3), (1, 1)]), ValueError,
     ["(1, 1)", "itself", "leave it out"]),
    ("edge of floats", lambda: from_edges(3, [(0, 1.5)]), ValueError, ["(0, 1.5)", "pair of node"]),
    ("no edges", lambda: from_edges(3, None), TypeError, ["pairs of node", "[(0, 1)", "None"]),
]  # fmt: skip


@each_refused(REFUSALS)
def test_refuses_with_what_was_given_and_the_cure(
    call: Callable[[], object], kind: type[Exception], words: list[str]
) -> None:
    assert_refused(call, kind, words)
