"""Eigenvalues and mixing rates of weight matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from decentlam.topology.weights import SparseWeights


def eigenvalues(w: SparseWeights) -> np.ndarray:
    """All eigenvalues of W, unsorted; real dtype when W is symmetric."""
    matrix = w.dense()
    if np.allclose(matrix, matrix.T, rtol=0, atol=1e-12):
        return np.linalg.eigvalsh(matrix)
    return np.linalg.eigvals(matrix)


def second_largest(w: SparseWeights) -> float:
    """rho = max |eigenvalue| off the average; the singular value when W is directed."""
    if w.same_as(w.transpose()):
        return float(np.sort(np.abs(eigenvalues(w)))[-2])
    return float(np.linalg.norm(w.dense() - 1.0 / w.num_nodes, 2))


def exact_after(period: Iterable[SparseWeights], n: int) -> int | None:
    """The first number of steps whose product is the average to rounding; None if none is.

    Followed on random vectors: weights that average these average everything. Disagreement is
    compared with that of the step before, so that long periods of fast mixing do not look exact.
    """
    x = np.random.default_rng(0).standard_normal((n, 4))
    x -= x.mean(0)
    for steps, w in enumerate(period, start=1):
        size = float(np.linalg.norm(x))
        x = w.apply(x)
        x -= x.mean(0)
        left = float(np.linalg.norm(x))
        if left <= 1e-12 * size:
            return steps
        x /= left
    return None


def periodic_rho(period: Iterable[SparseWeights], n: int) -> float:
    """Spectral radius of W_{T-1}...W_0 off the average, to the power 1/T.

    Rescaled at every step: a long period leaves less than the rounding error of its beginning.
    """
    product = np.eye(n) - 1.0 / n
    logs, steps = 0.0, 0
    for w in period:
        product = w.apply(product)
        product -= product.mean(0)
        size = float(np.linalg.norm(product))
        if size == 0:
            return 0.0
        product /= size
        logs += math.log(size)
        steps += 1
    radius = float(np.abs(np.linalg.eigvals(product)).max())
    return 0.0 if radius < 1e-12 else math.exp((logs + math.log(radius)) / steps)


def random_rho(
    sparse: Callable[[int], SparseWeights],
    n: int,
    pairing: float | None,
    pairings: int = 1,
    samples: int = 256,
) -> float:
    """sqrt of the second eigenvalue of E[W'W]: exact for random pairings, else sampled.

    m independent pairings P_i, P_i P_i = I, with weight v each have W = (1 - m v) I + v sum P_i;
    `pairing` is the largest eigenvalue p of E[P] off the average.
    """
    if pairing is not None:
        w, m, p = sparse(0), pairings, pairing
        kept = float(w.values[w.rows == w.columns].min(initial=1.0))  # by who has all partners
        v = (1 - kept) / m
        second = kept**2 + 2 * kept * v * m * p + v**2 * (m + m * (m - 1) * p**2)
        return math.sqrt(max(0.0, second))
    mean = sum(sparse(k).dense().T @ sparse(k).dense() for k in range(samples)) / samples
    return float(np.sqrt(np.abs(np.linalg.eigvalsh(mean - 1.0 / n)).max()))
