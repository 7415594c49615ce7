"""What every network is asked for: a number of nodes and a seed; errors name the cure."""

from __future__ import annotations

import numpy as np

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
