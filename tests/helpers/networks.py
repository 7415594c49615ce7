"""The networks that tests of topologies go through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from decentlam.topology import (
    TOPOLOGIES,
    Topology,
)

SIZES = [*range(1, 10), 12, 15, 16, 33]
DIRECTED = {"exponential": 3, "one-peer-exponential": 2}  # from more nodes than this on
SEVERAL_STEPS = 12  # of a random network


def networks(name: str, sizes: Iterable[int] = SIZES) -> Iterator[Topology]:
    for n in sizes:
        if "hypercube" not in name or n & (n - 1) == 0:
            net = TOPOLOGIES[name](n)
            assert net.num_nodes == n
            yield net


def steps_of(net: Topology) -> range:
    return range(SEVERAL_STEPS if net.period is None else net.period)


def edges_of(net: Topology, step: int = 0) -> set[tuple[int, int]]:
    n = net.num_nodes
    return {(i, j) for i in range(n) for j in net.neighbors(i, step) if i < j}


every_topology = pytest.mark.parametrize("name", TOPOLOGIES)
every_periodic_topology = pytest.mark.parametrize(
    "name", [name for name, constructor in TOPOLOGIES.items() if constructor(8).period is not None]
)
