"""Drawings of topologies; one panel per step."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from decentlam.topology import Topology

LARGEST = 512  # nodes; beyond that a drawing is a blot

_INK, _NODE, _EDGE = "#332288", "#E8F0FA", "#88AACC"


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
        return radius * np.concatenate([[[0.0, 0.0]], circle(n - 1)])
    return radius * circle(n)


def circle(n: int) -> np.ndarray:
    """Return n places on a circle of radius 1, (n, 2), the first on top."""
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
