"""Drawings of topologies, as figures and as SVG."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentlam import TOPOLOGIES, topology
from decentlam.lab.report import (
    topology_drawing,
)
from decentlam.lab.report.runs import read
from decentlam.lab.report.topology_drawing import draw, positions
from tests.lab.report.written_runs import (
    write_run,
)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_can_be_drawn(name: str):
    figure = draw(TOPOLOGIES[name](8))
    assert len(figure.axes) == min(TOPOLOGIES[name](8).period or 4, 4)


def test_drawings_of_small_and_lazy_networks(tmp_path: Path):
    for network in (topology.ring(1), topology.ring(2), topology.mesh(8).lazy(0.5)):
        assert positions(network).shape == (network.num_nodes, 2)
        draw(network)
    with pytest.raises(ValueError, match="up to 512 nodes, got 513"):
        draw(topology.ring(513))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_is_drawn_with_all_its_nodes_and_edges(tmp_path: Path, name: str):
    (drawing,) = topology_drawing.html_figures([read(write_run(tmp_path / "run", topology=name))])
    graph = TOPOLOGIES[name](8)
    panels = drawing.split("<svg")[1:]
    assert len(panels) == min(graph.period or 4, 4)
    for step, panel in enumerate(panels):
        directed = int((graph.weights(step) - graph.weights(step).diag().diag() > 0).sum())
        assert panel.count("<circle") == 8
        assert panel.count("<path") == (directed // 2 if graph.symmetric else directed)
    repeats = f"repeats every {graph.period} steps" if graph.period else "Random at every step"
    assert (repeats in drawing) == (graph.period != 1)


def test_a_network_that_cannot_be_drawn_is_said_so(tmp_path: Path):
    runs = [
        read(write_run(tmp_path / "a", topology="<b>mine</b>")),
        read(write_run(tmp_path / "b", topology="complete", nodes=256)),
        read(write_run(tmp_path / "c", topology="ring", nodes=1)),
    ]
    unknown, large, lone = topology_drawing.html_figures(runs)
    assert "is not drawn: unknown topology" in unknown and "<b>" not in unknown
    assert "too large to draw" in large and "<circle" not in large
    assert lone.count("<circle") == 1 and "<path" not in lone
