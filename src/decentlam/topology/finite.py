"""Networks that average exactly after finitely many steps, with few peers, for any n."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np

from decentlam.topology.base import Topology, check_num_nodes
from decentlam.topology.weights import SparseWeights, symmetric_weights

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]  # one end, the other end, weight


def base_graph(n: int, k: int = 1) -> Topology:
    """The Base-(k+1) graph: at most k peers, exact in at most 2 log_{k+1}(n) + 2 steps, any n.

    The digits of n in base k + 1 split the nodes into sets of a (k+1)^p nodes. First each set
    averages its own nodes. Then each set, the largest first, averages with all smaller sets at
    once, with weights such that every part of it holds the average of all nodes. Finally the parts
    average their own nodes. Idle nodes average with nodes that are already equal, which does not
    change the result but helps in training. The average is exact over a whole period only.

    Takezawa, Sato, Bao, Niwa, Yamada: Beyond Exponential Graph, 2023 (arXiv 2305.11420), where this
    is the simple Base-(k+1) graph.

    >>> base_graph(5).description, base_graph(5).exact_after
    ('5 = 4 + 1, at most 1 peer', 5)
    """
    n = check_num_nodes(n, "base_graph")
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"base_graph needs k, the most peers, of 1 or more, got {k!r}; try 1")
    k = int(k)
    sets = _sets(n, k + 1)
    steps = len(_set_factors(*sets[0], k + 1))
    if len(sets) > 1:  # hand over, then average parts of (k+1)^p nodes
        steps += 1 + len(_set_factors(1, sets[0][1], k + 1))
    made = " + ".join(str(count * size) for count, size in sets)
    return Topology(
        f"base-{k + 1}",
        n,
        max(1, steps),
        partial(_base_step, n, k + 1),
        f"{n} = {made}, at most {k} peer{'s' if k > 1 else ''}",
    )


def base_2(n: int) -> Topology:
    """Base-2 graph: one peer per step, exact in at most 2 log2(n) + 2 steps for any n."""
    return base_graph(n, 1)


def base_4(n: int) -> Topology:
    """Base-4 graph: at most three peers per step, exact in at most 2 log4(n) + 2 steps."""
    return base_graph(n, 3)


# One step ----------------------------------------------------------------------------------------


def _base_step(n: int, base: int, step: int) -> SparseWeights:
    sets = _sets(n, base)
    gather = len(_set_factors(*sets[0], base))  # the largest set is the last to be done
    edges: list[Edges] = []
    first = 0
    for place, (count, size) in enumerate(sets):
        nodes = np.arange(first, first + count * size)
        first += count * size
        factors = _set_factors(count, size, base)
        since = step - gather - place
        if step < gather:
            edges.append(_cuboid(nodes, factors, step % max(1, len(factors))))
        elif first == n and since >= 0:  # the smallest set has got its shares and is done
            edges.append(_cuboid(nodes, factors, since % max(1, len(factors))))
        elif since == 0:
            edges += _hand_over(nodes.reshape(count, size), np.arange(first, n), base)
        elif since > 0:  # inside the parts: along the digits below `count`
            edges.append(_cuboid(nodes, factors, (since - 1) % (len(factors) - (count > 1))))
    return symmetric_weights(n, *_join(edges))


def _hand_over(parts: np.ndarray, smaller: np.ndarray, base: int) -> list[Edges]:
    """Every smaller node meets one node of each part, (count, size), all of them different.

    With S nodes here and in the smaller sets together, a weight of size / S gives the smaller node
    its average of all S, and every part the right sum.
    """
    met, idle = parts[:, : len(smaller)], parts[:, len(smaller) :].ravel()
    weight = parts.shape[1] / (parts.size + len(smaller))
    here = (np.tile(smaller, len(parts)), met.ravel(), np.full(met.size, weight))
    even = len(idle) - len(idle) % base
    rest = [idle[even:]] if even < len(idle) else []
    return [here, _complete(idle[:even].reshape(-1, base)), *(_complete(r[None]) for r in rest)]


def _cuboid(nodes: np.ndarray, factors: Sequence[int], place: int) -> Edges:
    """Averages over one digit of the nodes' positions, written in these radices."""
    if place >= len(factors):
        return _join([])
    stride = prod(factors[:place])
    groups = nodes.reshape(-1, factors[place], stride).swapaxes(1, 2)
    return _complete(groups.reshape(-1, factors[place]))


def _complete(groups: np.ndarray) -> Edges:
    """The exact average within each row of (groups, size) nodes."""
    size = groups.shape[1]
    left, right = np.triu_indices(size, 1)
    i, j = groups[:, left].ravel(), groups[:, right].ravel()
    return i, j, np.full(len(i), 1.0 / size)


def _join(edges: list[Edges]) -> Edges:
    nobody = np.empty(0, dtype=np.int64)
    i, j, weight = zip((nobody, nobody, np.empty(0)), *edges, strict=True)
    return np.concatenate(i), np.concatenate(j), np.concatenate(weight)


# Numbers -----------------------------------------------------------------------------------------


def _sets(n: int, base: int) -> list[tuple[int, int]]:
    """The digits of n that are not zero as (digit, base^place), the largest place first."""
    sets, size = [], 1
    while n:
        n, digit = divmod(n, base)
        if digit:
            sets.append((digit, size))
        size *= base
    return sets[::-1]


def _set_factors(count: int, size: int, base: int) -> tuple[int, ...]:
    factors: tuple[int, ...] = (count,) if count > 1 else ()
    while size > 1:
        factors = (base, *factors)
        size //= base
    return factors
