"""Eigenvalues and mixing rates of weight matrices, without dense work where structure allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from decentlam.topology.sparse import SparseWeights


def eigenvalues(w: SparseWeights) -> np.ndarray:
    """All eigenvalues of W, unsorted; real dtype when W is symmetric."""
    for block in (1, 2):  # ring, exponential graphs: the same rows again after 1 or 2 nodes
        if w.num_nodes > 16 and w.num_nodes % block == 0 and _repeats_every(w, block):
            return _block_circulant_eigenvalues(w, block)
    matrix = w.dense()
    if np.allclose(matrix, matrix.T, rtol=0, atol=1e-12):
        return np.linalg.eigvalsh(matrix)
    return np.linalg.eigvals(matrix)


def second_largest(w: SparseWeights) -> float:
    """rho = max |eigenvalue| off the average; the singular value when W is directed."""
    if w.same_as(w.transpose()):
        return float(np.sort(np.abs(eigenvalues(w)))[-2])
    return float(np.linalg.norm(w.dense() - 1.0 / w.num_nodes, 2))


def periodic_rho(period: list[SparseWeights]) -> float:
    """Spectral radius of W_{T-1}...W_0 off the average, to the power 1/T."""
    n = period[0].num_nodes
    product = np.eye(n) - 1.0 / n
    for w in period:
        product = w.dense() @ product
    radius = float(np.abs(np.linalg.eigvals(product)).max())
    return 0.0 if radius < 1e-12 else radius ** (1.0 / len(period))


def random_rho(sparse: Callable[[int], SparseWeights], n: int, samples: int = 256) -> float:
    """sqrt of the second eigenvalue of E[W'W]: exact for random pairings, else sampled.

    A pairing P with weight v has W = (1 - v) I + v P and P P = I, and a uniformly random P acts
    off the average as -1 / (n - 1) in expectation, or as 0 for odd n, where one node rests.
    """
    v = _pairing_weight(sparse(0))
    if v is not None:
        swap = -1.0 / (n - 1) if n % 2 == 0 else 0.0
        return float(np.sqrt((1 - v) ** 2 + v**2 + 2 * v * (1 - v) * swap))
    mean = sum(sparse(k).dense().T @ sparse(k).dense() for k in range(samples)) / samples
    return float(np.sqrt(np.abs(np.linalg.eigvalsh(mean - 1.0 / n)).max()))


def _pairing_weight(w: SparseWeights) -> float | None:
    """The weight of a partner if every node has at most one, and all weights are alike."""
    partner = w.values[w.rows != w.columns]
    if len(partner) and np.diff(w.starts).max() <= 2 and np.ptp(partner) < 1e-12:
        return float(partner[0])
    return None


def _repeats_every(w: SparseWeights, block: int) -> bool:
    """Whether W[i + block, j + block] = W[i, j] (indices modulo n)."""
    n = w.num_nodes
    shifted = SparseWeights.from_entries(n, (w.rows + block) % n, (w.columns + block) % n, w.values)
    return w.same_as(shifted)


def _block_circulant_eigenvalues(w: SparseWeights, block: int) -> np.ndarray:
    """A Fourier transform over the blocks leaves one (block x block) matrix per frequency."""
    n = w.num_nodes
    first = np.zeros((block, n))
    head = w.rows < block
    first[w.rows[head], w.columns[head]] = w.values[head]
    blocks = np.fft.fft(first.reshape(block, n // block, block), axis=1).transpose(1, 0, 2)
    symmetric = np.allclose(blocks, blocks.conj().transpose(0, 2, 1), rtol=0, atol=1e-12)
    values = np.linalg.eigvalsh(blocks) if symmetric else np.linalg.eigvals(blocks)
    return values.reshape(-1)
