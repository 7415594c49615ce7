"""Drawings of topologies."""

from __future__ import annotations

import pytest

from decentlam import TOPOLOGIES, topology
from decentlam.lab.topology_drawing import draw, positions


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_can_be_drawn(name: str):
    figure = draw(TOPOLOGIES[name](8))
    assert len(figure.axes) == min(TOPOLOGIES[name](8).period or 4, 4)


def test_drawings_of_small_and_lazy_networks():
    for network in (topology.ring(1), topology.ring(2), topology.mesh(8).lazy(0.5)):
        assert positions(network).shape == (network.num_nodes, 2)
        draw(network)
    with pytest.raises(ValueError, match="up to 64 nodes, got 65"):
        draw(topology.ring(65))
