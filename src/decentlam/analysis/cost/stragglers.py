"""Late nodes: an all-reduce waits for the slowest of all, a neighborhood only for its own.

The times at which nodes finish their steps obey a max-plus recursion,

    t_i+ = max(t_i + d_i, max over neighbors j of (t_j + d_j) - slack) + c,

c being the time of a step without the delays d. It has no closed form on a general topology, so it
is simulated; for an all-reduce at every step it is c + E[max d].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from decentlam.algorithms import Reach
from decentlam.analysis.cost.values import Delays
from decentlam.topology import Topology


def straggler_wait(
    topology: Topology,
    delays: Delays,
    slack: float = 0.0,
    *,
    reach: Callable[[int], Reach] = lambda index: Reach.NEIGHBORS,
    early: bool = False,
    seed: int = 0,
    settle: int = 200,
    steps: int = 800,
) -> float:
    """Mean seconds per step that delays cost, after `settle` steps in which nodes drift apart.

    `slack` is by how much a message may be delayed without harm. `early` messages (AWC) leave
    before the delay of their own step, which then reaches the neighbors one step later.

    >>> from decentlam.topology import complete, one_peer_hypercube
    >>> straggler_wait(complete(8), Delays(1.0))
    1.0
    >>> straggler_wait(one_peer_hypercube(8), Delays(1.0)) < 0.6
    True
    """
    n = topology.num_nodes
    if delays.seconds == 0:
        return 0.0
    if all(reach(k) is Reach.EVERYONE for k in range(settle + steps)):
        return delays.mean_of_slowest(n)
    generator = np.random.default_rng(seed)
    t, start = np.zeros(n), 0.0
    for k in range(settle + steps):
        if k == settle:
            start = float(t.mean())
        own = t + delays.draw(generator, n)
        if reach(k) is Reach.EVERYONE:
            t = np.full(n, own.max())
        elif reach(k) is Reach.NOBODY:
            t = own
        else:
            told = (t if early else own) - slack
            w = topology.sparse(k)
            t = np.maximum(own, np.maximum.reduceat(told[w.columns], w.starts[:-1]))
    return (float(t.mean()) - start) / steps
