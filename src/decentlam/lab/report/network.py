"""The topologies of the runs as drawings in the page, one panel per step where they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decentlam.lab.draw import LARGEST, positions
from decentlam.lab.report.runs import Run
from decentlam.lab.report.text import escape, quantity
from decentlam.topology import Topology, resolve

_PANELS = 4
_LABELS_UP_TO = 32  # nodes
_MOST_EDGES = 5000  # a page of some hundred kilobytes


def drawings(runs: Sequence[Run]) -> list[str]:
    """A figure for every network that the runs used."""
    asked = [(run.recipe.get("topology"), run.recipe.get("nodes")) for run in runs]
    return [_figure(name, nodes) for name, nodes in {repr(pair): pair for pair in asked}.values()]


def _figure(name: Any, nodes: Any) -> str:
    try:
        topology = resolve(name, nodes)
    except (TypeError, ValueError) as error:
        return f"<p>{escape(name)} with {escape(nodes)} nodes is not drawn: {escape(error)}.</p>"
    count = min(topology.period or _PANELS, _PANELS)
    drawn = nodes <= LARGEST and len(topology.sparse(0).values) <= _MOST_EDGES
    panels = [_panel(topology, step, count) for step in range(count)] if drawn else []
    wide = " wide" if len(panels) > 1 else ""
    return (
        f'<figure class="network{wide}"><div class="panels">{"".join(panels)}</div>'
        f"<figcaption>{escape(_caption(topology, drawn))}</figcaption></figure>"
    )


def _caption(topology: Topology, drawn: bool) -> str:
    n, period = topology.num_nodes, topology.period
    head = f"{topology.name}, {n} nodes" if n != 1 else f"{topology.name}, one node"
    change = {
        None: f" Random at every step: the first {_PANELS} are shown.",
        1: "",
    }.get(period, f" It repeats every {period} steps.")
    if period is not None and period > _PANELS:
        change += f" The first {_PANELS} are shown."
    weights = topology.sparse(0)
    edges = weights.values[weights.rows != weights.columns]
    low, high = (float(edges.min()), float(edges.max())) if len(edges) else (0.0, 0.0)
    each = "Every edge weighs" if high - low < 1e-9 else f"Edges weigh from {quantity(low)} to"
    weigh = f" {each} {quantity(high)}." if len(edges) else ""
    left_out = "" if drawn else " It is too large to draw."
    keeps = f"A step keeps {abs(topology.rho):.3f} of a disagreement (ρ)."
    return f"{head}. {keeps}{weigh}{change}{left_out}"


def _panel(topology: Topology, step: int, count: int) -> str:
    places = positions(topology) * (1, -1)  # down is positive in SVG
    n = len(places)
    radius = 0.17 if n <= 16 else 0.1 if n <= 64 else max(0.02, 4.0 / n)
    scale = float(np.ptp(places, axis=0).max()) / 3.2 if n > 1 else 1.0
    radius *= max(0.5, scale) if n > 16 else max(0.8, scale)
    low, high = places.min(0) - 1.6 * radius, places.max(0) + 1.6 * radius
    (left, top), (width, height) = low, high - low
    weights = topology.sparse(step)
    directed = not topology.symmetric
    shown = weights.rows != weights.columns if directed else weights.rows < weights.columns
    ends = list(zip(weights.columns[shown], weights.rows[shown], strict=True))
    wraps = topology.name == "torus"
    edges = [_edge(places[a], places[b], radius, directed, wraps) for a, b in ends]
    nodes = [_node(node, place, radius, n) for node, place in enumerate(places)]
    at = f" at step {step}" if count > 1 else ""
    label = f"{topology.name} of {n} nodes{at}: {len(ends)} {'arrows' if directed else 'edges'}"
    title = f"<span>step {step}</span>" if count > 1 else ""
    return (
        f'<div><svg role="img" aria-label="{escape(label)}" '
        f'viewBox="{left:.3f} {top:.3f} {width:.3f} {height:.3f}">'
        f"{''.join(edges)}{''.join(nodes)}</svg>{title}</div>"
    )


def _node(node: int, place: np.ndarray, radius: float, n: int) -> str:
    x, y = place
    circle = f'<circle cx="{x:.3f}" cy="{y:.3f}" r="{radius:.3f}"/>'
    if n > _LABELS_UP_TO:
        return circle
    size = radius * (1.0 if node < 10 else 0.9)
    return (
        circle + f'<text x="{x:.3f}" y="{y + 0.36 * size:.3f}" font-size="{size:.3f}">{node}</text>'
    )


def _edge(a: np.ndarray, b: np.ndarray, radius: float, directed: bool, wraps: bool) -> str:
    """A line from node to node; bent where two directions, or a torus's way round, would hide."""
    along = (b - a) / max(1e-9, float(np.linalg.norm(b - a)))
    aside = np.array([along[1], -along[0]])
    far = float(np.linalg.norm(b - a))
    bend = 0.08 * far if directed else 0.18 * far if wraps and far > 1 else 0.0
    middle = (a + b) / 2 + bend * aside
    start, stop = a + radius * _unit(middle - a), b - 1.1 * radius * _unit(b - middle)
    path = f'<path d="{_curve(start, middle, stop)}"/>'
    if not directed:
        return path
    back, side = 0.55 * radius * _unit(b - middle), 0.3 * radius
    across = side * np.array([-_unit(b - middle)[1], _unit(b - middle)[0]])
    corners = (stop, stop - back + across, stop - back - across)
    return path + f'<polygon points="{" ".join(f"{x:.3f},{y:.3f}" for x, y in corners)}"/>'


def _curve(start: np.ndarray, middle: np.ndarray, stop: np.ndarray) -> str:
    (x0, y0), (x1, y1), (x2, y2) = start, middle, stop
    return f"M{x0:.3f} {y0:.3f}Q{x1:.3f} {y1:.3f} {x2:.3f} {y2:.3f}"


def _unit(v: np.ndarray) -> np.ndarray:
    return v / max(1e-9, float(np.linalg.norm(v)))
