"""Whether momentum and a changing network get along: the growth of disagreement per step."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from decentlam.algorithms import Algorithm
from decentlam.simulate import Nodes
from decentlam.topology import Topology

log = logging.getLogger(__name__)

_DIRECTIONS = 16  # random disagreements followed at once; the largest growth takes over


def growth(
    algorithm: str | Algorithm,
    topology: Topology,
    momentum: float | None = None,
    *,
    steps: int = 400,
    seed: int = 0,
    **hyper: Any,
) -> float:
    """The factor by which one step multiplies the disagreement between nodes; above 1 diverges.

    The algorithm itself is run without gradients from random disagreements, rescaled at every
    step (power iteration; for random weights this estimates the Lyapunov exponent).

    >>> from decentlam.topology import bipartite_random_match, ring
    >>> growth("decentlam", ring(8), momentum=0.9) < 1
    True
    >>> growth("decentlam", bipartite_random_match(8), momentum=0.9) > 1.02
    True
    """
    n = topology.num_nodes
    if n == 1:
        return 0.0
    directions = torch.randn(
        n, _DIRECTIONS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    nodes = Nodes(algorithm, topology, directions, momentum, **hyper)
    nothing = torch.zeros_like(directions)
    warm_up, logs = steps // 4, 0.0
    for k in range(steps):
        nodes.step(nothing, 1.0)
        nodes.x.sub_(nodes.x.mean(0))
        size = nodes.x.square().sum() + sum(
            (tensor.square().sum() for state in nodes._states for tensor in state.values()),
            torch.zeros((), dtype=torch.float64),
        )
        scale = math.sqrt(size.item())
        if scale < 1e-280:
            return 0.0  # averaged exactly
        for tensor in (nodes.x, *(t for state in nodes._states for t in state.values())):
            tensor.div_(scale)
        if k >= warm_up:
            logs += math.log(scale)
    return math.exp(logs / (steps - warm_up))


def warn_if_unstable(algorithm: Algorithm, topology: Topology) -> None:
    """Logs when momentum on the disagreement itself will blow it up.

    That takes weights that change, or Nesterov's look-ahead on weights with negative eigenvalues.
    """
    looks_ahead = getattr(algorithm, "nesterov", False)
    if not algorithm.needs_symmetric or (topology.static and not looks_ahead):
        return
    factor = growth(algorithm, topology, steps=200)
    if factor > 1.001:
        log.warning(
            "%r on %r multiplies the disagreement between nodes by about %.3f at every step and "
            "will diverge. Use a static topology%s, a smaller momentum, or QGDmSGD.",
            algorithm,
            topology,
            factor,
            " or topology.lazy()" if looks_ahead else "",
        )
