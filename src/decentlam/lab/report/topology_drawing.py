"""Drawings of topologies: matplotlib figures, and SVG for the report; one panel per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from decentlam.lab.report.formatting import escape, quantity
from decentlam.lab.report.runs import Run
from decentlam.topology import Topology, resolve

LARGEST = 512  # nodes; beyond that a drawing is a blot

_INK, _NODE, _EDGE = "#332288", "#E8F0FA", "#88AACC"
_PANELS = 4
_LABELS_UP_TO = 32  # nodes
_MOST_EDGES = 5000  # a page of some hundred kilobytes


def draw(topology: Topology, steps: int | None = None) -> Figure:
    """Return a figure with a panel for each of the first `steps` steps; by default one period, at
    most four."""
    n = topology.num_nodes
    if n > LARGEST:
        raise ValueError(f"a drawing shows up to {LARGEST} nodes, got {n}; leave the drawing away")
    count = min(topology.period or 4, 4) if steps is None else steps
    if not 1 <= count <= 16:
        raise ValueError(f"a drawing shows from 1 to 16 steps, got {count}; try 4")
    places = positions(topology)
    low, high = places.min(0) - 0.3, places.max(0) + 0.3
    columns, rows = min(count, 4), -(-count // 4)
    width, height = (high - low) * (2.2 if count == 1 else 1.4)
    size = max(3.6, columns * width), rows * (height + 0.3) + 0.5
    figure = Figure(figsize=size, layout="constrained")
    weights: set[float | None] = set()
    for step, ax in enumerate(figure.subplots(rows, columns, squeeze=False).flatten()):
        ax.set_axis_off()
        ax.set(aspect="equal", xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        if step < count:
            weight = _draw_step(ax, topology, step, places)
            weights.add(None if weight is None else round(weight, 9))
            if count > 1:
                ax.set_title(f"step {step}", fontsize=10)
    same = weights.pop() if len(weights) == 1 else None
    title = f"{topology!r}: $\\rho$ = {topology.rho:.3f}"
    figure.suptitle(title + (f", every edge weighs {same:.3g}" if same else ""), fontsize=11)
    return figure


def positions(topology: Topology) -> np.ndarray:
    """Return where the nodes stand, (n, 2): meshes on a grid, the hub of a star in its middle."""
    n = topology.num_nodes
    kind = topology.name.removeprefix("lazy(").split(",")[0]
    if kind in ("mesh", "torus") and n > 3:
        height = next(h for h in range(int(n**0.5), 0, -1) if n % h == 0)
        row, column = np.divmod(np.arange(n), n // height)
        return np.stack([column, -row], 1) * 0.8
    radius = max(1.0, 0.25 * n / np.pi) if n <= 32 else 2.4
    if kind == "star" and n > 2:
        return radius * np.concatenate([[[0.0, 0.0]], _circle(n - 1)])
    return radius * _circle(n)


def _circle(n: int) -> np.ndarray:
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angle), np.sin(angle)], 1) * (n > 1)


def _draw_step(ax: Axes, topology: Topology, step: int, places: np.ndarray) -> float | None:
    """Draw W of one step; return the weight of every edge if all have the same one."""
    n = len(places)
    w = topology.sparse(step)
    directed = not topology.symmetric
    shown = w.rows != w.columns if directed else w.rows < w.columns
    to, start, values = w.rows[shown], w.columns[shown], w.values[shown]
    widths = (3.0 if n <= 32 else 1.5) * values / max(values, default=1.0)
    if n <= 64:
        for a, b, width in zip(places[start], places[to], widths, strict=True):
            _draw_edge(ax, a, b, width, directed, "torus" in topology.name)
    else:
        segments = list(np.stack([places[start], places[to]], axis=1))
        ax.add_collection(LineCollection(segments, linewidths=widths / 2, colors=_EDGE, zorder=1))
    same = len(values) and np.ptp(values) < 1e-9
    if n <= 16 and not same and not directed:
        for a, b, value in zip(places[start], places[to], values, strict=True):
            box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            _write(ax, f"{value:.3g}", a + 0.45 * (b - a), 7, box)
    size = 300 if n <= 16 else 110 if n <= 64 else 1500 / n
    ax.scatter(places[:, 0], places[:, 1], s=size, c=_NODE, edgecolors=_INK, linewidths=1, zorder=3)
    if n <= 64:
        for node, place in enumerate(places):
            _write(ax, str(node), place, 9 if n <= 16 else 6)
    return float(values[0]) if same else None


def _draw_edge(
    ax: Axes, a: np.ndarray, b: np.ndarray, width: float, directed: bool, wraps: bool
) -> None:
    # Directed edges bend so that both directions show; a torus's wrap around the grid.
    bend = 0.08 if directed else 0.18 if wraps and np.linalg.norm(b - a) > 1 else 0.0
    ax.add_patch(
        FancyArrowPatch(
            tuple(a),
            tuple(b),
            arrowstyle="-|>" if directed else "-",
            mutation_scale=11,
            shrinkA=8,
            shrinkB=9,
            connectionstyle=f"arc3,rad={bend}",
            color=_EDGE,
            linewidth=max(0.4, width * (0.5 if directed else 1.0)),
            zorder=1,
        )
    )


def _write(
    ax: Axes, text: str, place: np.ndarray, size: int, box: dict[str, str] | None = None
) -> None:
    ax.text(place[0], place[1], text, ha="center", va="center", fontsize=size, bbox=box, zorder=4)


# SVG for the report


def html_figures(runs: Sequence[Run]) -> list[str]:
    """Return a figure for every topology that the runs used."""
    asked = [(run.recipe.get("topology"), run.recipe.get("nodes")) for run in runs]
    each_once = {repr(pair): pair for pair in asked}
    return [_html_figure(name, nodes) for name, nodes in each_once.values()]


def _html_figure(name: Any, nodes: Any) -> str:
    try:
        topology = resolve(name, nodes)
    except (TypeError, ValueError) as error:
        return f"<p>{escape(name)} with {escape(nodes)} nodes is not drawn: {escape(error)}.</p>"
    count = min(topology.period or _PANELS, _PANELS)
    drawn = nodes <= LARGEST and len(topology.sparse(0).values) <= _MOST_EDGES
    panels = [_svg_panel(topology, step, count) for step in range(count)] if drawn else []
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


def _svg_panel(topology: Topology, step: int, count: int) -> str:
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
    edges = [_svg_edge(places[a], places[b], radius, directed, wraps) for a, b in ends]
    nodes = [_svg_node(node, place, radius, n) for node, place in enumerate(places)]
    at = f" at step {step}" if count > 1 else ""
    label = f"{topology.name} of {n} nodes{at}: {len(ends)} {'arrows' if directed else 'edges'}"
    title = f"<span>step {step}</span>" if count > 1 else ""
    return (
        f'<div><svg role="img" aria-label="{escape(label)}" '
        f'viewBox="{left:.3f} {top:.3f} {width:.3f} {height:.3f}">'
        f"{''.join(edges)}{''.join(nodes)}</svg>{title}</div>"
    )


def _svg_node(node: int, place: np.ndarray, radius: float, n: int) -> str:
    x, y = place
    circle = f'<circle cx="{x:.3f}" cy="{y:.3f}" r="{radius:.3f}"/>'
    if n > _LABELS_UP_TO:
        return circle
    size = radius * (1.0 if node < 10 else 0.9)
    return (
        circle + f'<text x="{x:.3f}" y="{y + 0.36 * size:.3f}" font-size="{size:.3f}">{node}</text>'
    )


def _svg_edge(a: np.ndarray, b: np.ndarray, radius: float, directed: bool, wraps: bool) -> str:
    """Return a line from node to node; bent where two directions, or a torus's edge, would hide."""
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
