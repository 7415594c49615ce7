"""Who talks to whom: topologies as pure functions of the step."""

from __future__ import annotations

from collections.abc import Callable

from decentlam.errors import unknown
from decentlam.topology.base import Topology as Topology
from decentlam.topology.custom import from_edges as from_edges
from decentlam.topology.custom import from_weights as from_weights
from decentlam.topology.finite import base_2 as base_2
from decentlam.topology.finite import base_4 as base_4
from decentlam.topology.finite import base_graph as base_graph
from decentlam.topology.static import complete as complete
from decentlam.topology.static import exponential as exponential
from decentlam.topology.static import hypercube as hypercube
from decentlam.topology.static import mesh as mesh
from decentlam.topology.static import ring as ring
from decentlam.topology.static import star as star
from decentlam.topology.static import symmetric_exponential as symmetric_exponential
from decentlam.topology.static import torus as torus
from decentlam.topology.varying import bipartite_random_match as bipartite_random_match
from decentlam.topology.varying import one_peer_exponential as one_peer_exponential
from decentlam.topology.varying import one_peer_hypercube as one_peer_hypercube
from decentlam.topology.varying import (
    one_peer_symmetric_exponential as one_peer_symmetric_exponential,
)
from decentlam.topology.varying import two_random_matches as two_random_matches
from decentlam.topology.weights import SparseWeights as SparseWeights

TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "ring": ring,
    "mesh": mesh,
    "torus": torus,
    "star": star,
    "complete": complete,
    "hypercube": hypercube,
    "exponential": exponential,
    "symmetric-exponential": symmetric_exponential,
    "one-peer-exponential": one_peer_exponential,
    "one-peer-symmetric-exponential": one_peer_symmetric_exponential,
    "one-peer-hypercube": one_peer_hypercube,
    "base-2": base_2,
    "base-4": base_4,
    "bipartite-random-match": bipartite_random_match,
    "two-random-matches": two_random_matches,
}


def resolve(topology: str | Topology, num_nodes: int | None) -> Topology:
    """The topology of that name with `num_nodes` nodes, or the given one if it fits.

    None leaves the number to the topology, which must then be a Topology.
    """
    if isinstance(topology, Topology):
        if num_nodes not in (None, topology.num_nodes):
            raise ValueError(
                f"{topology!r} is made for {topology.num_nodes} nodes, but there are {num_nodes}; "
                f"build it with n = {num_nodes}"
            )
        return topology
    if not isinstance(topology, str):
        raise TypeError(
            f"topology must be a name or a Topology, got {type(topology).__name__}; "
            "wrap a weight matrix with decentlam.topology.from_weights"
        )
    if topology not in TOPOLOGIES:
        raise ValueError(unknown("topology", topology, sorted(TOPOLOGIES)))
    if num_nodes is None:
        raise ValueError(
            f"how many nodes has {topology!r}? Pass num_nodes, or a Topology such as ring(8)"
        )
    return TOPOLOGIES[topology](num_nodes)
