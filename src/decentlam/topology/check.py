"""What a network must be before anything is trained on it; each refusal names the cure."""

from __future__ import annotations

import operator

import numpy as np

from decentlam.topology.sparse import SparseWeights

_MOST_NODES = 1_000_000


def check_num_nodes(n: int, name: str, most: int = _MOST_NODES) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise TypeError(f"{name} needs a whole number of nodes, got {n!r}")
    if n < 1:
        raise ValueError(f"{name} needs at least 1 node, got {n}")
    if n > most:
        raise ValueError(f"{name} can have at most {most:,} nodes, got more")
    return int(n)  # numpy's integers lack bit_length


def check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of 0 or more, got {seed!r}")
    return seed


def check_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number of 0 or more, got {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be 0 or more, got {number}")
    return number


def check_weights(w: SparseWeights, name: str, *, directed: bool = False) -> None:
    """Refuses weights that are not finite, stochastic, symmetric (unless `directed`), connected."""
    n = w.num_nodes
    if not np.isfinite(w.values).all():
        raise ValueError(f"{name}: the weights contain NaN or infinity; every w_ij must be finite")
    if (w.values < 0).any():
        worst = int(np.argmin(w.values))
        raise ValueError(
            f"{name}: weight [{w.rows[worst]}, {w.columns[worst]}] is {w.values[worst]:g}; weights "
            "must not be negative. Try from_edges, which computes Metropolis-Hastings weights."
        )
    sums = np.bincount(w.rows, w.values, n)
    if not np.allclose(sums, 1, rtol=0, atol=1e-9):
        worst = int(np.abs(sums - 1).argmax())
        raise ValueError(
            f"{name}: row {worst} of the weights sums to {sums[worst]:.10g}, every row must sum to "
            "1 within 1e-9 (compute W in float64). Divide each row by its sum if W is symmetric "
            "after that, or use from_edges."
        )
    if not directed and not w.same_as(w.transpose(), 1e-9):
        i, j = _first_asymmetric(w)
        raise ValueError(
            f"{name}: the weights are not symmetric: w[{i}, {j}] = {w.row(i).get(j, 0.0):g} but "
            f"w[{j}, {i}] = {w.row(j).get(i, 0.0):g}. Use from_edges (Metropolis-Hastings weights "
            "are symmetric on every graph), or directed=True if the directions are meant."
        )
    columns = np.bincount(w.columns, w.values, n)
    if not np.allclose(columns, 1, rtol=0, atol=1e-9):
        worst = int(np.abs(columns - 1).argmax())
        raise ValueError(
            f"{name}: column {worst} of the weights sums to {columns[worst]:.6g}; columns must sum "
            "to 1, or mixing would shift the average. Use from_edges for a doubly stochastic W."
        )
    check_mixing(w, name)


def check_mixing(w: SparseWeights, name: str) -> None:
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
    """In how many steps node 0 hears of each node, (n,); -1: never, whatever the directions."""
    distance, steps, rows = np.full(w.num_nodes, -1), 0, w.rows
    distance[0] = 0
    while True:
        heard = w.columns[(distance == steps)[rows]]
        new = heard[distance[heard] < 0]
        if not len(new):
            return distance
        steps += 1
        distance[new] = steps


def _first_asymmetric(w: SparseWeights) -> tuple[int, int]:
    matrix = w.dense()
    i, j = np.unravel_index(int(np.abs(matrix - matrix.T).argmax()), matrix.shape)
    return int(i), int(j)
