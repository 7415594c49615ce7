"""Drawings of topologies; one panel per step."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from decentlam.topology import Topology

LARGEST = 64  # nodes; beyond that a drawing is a blot

_INK, _NODE, _EDGE = "#332288", "#E8F0FA", "#88AACC"


def draw(topology: Topology, steps: int | None = None) -> Figure:
    """Return a figure with a panel for each of the first `steps` steps, or of one period; at most
    four."""
    if topology.num_nodes > LARGEST:
        raise ValueError(
            f"a drawing shows up to {LARGEST} nodes, got {topology.num_nodes}; leave it away"
        )
    count = min(steps or topology.period or 4, 4)
    places = positions(topology)
    low, high = places.min(0) - 0.3, places.max(0) + 0.3
    width, height = (high - low) * (2.2 if count == 1 else 1.4)
    figure = Figure(figsize=(max(3.6, count * width), height + 0.8), layout="constrained")
    for step, ax in enumerate(figure.subplots(1, count, squeeze=False).flatten()):
        ax.set_axis_off()
        ax.set(aspect="equal", xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        _draw_step(ax, topology, step, places)
        ax.set_title(f"step {step}" if count > 1 else "", fontsize=10)
    figure.suptitle(f"{topology!r}: $\\rho$ = {topology.rho:.3f}", fontsize=11)
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


def _draw_step(ax: Axes, topology: Topology, step: int, places: np.ndarray) -> None:
    """Draw W of one step: the wider an edge, the larger its weight."""
    w = topology.sparse(step)
    directed = not topology.symmetric
    shown = w.rows != w.columns if directed else w.rows < w.columns
    to, start, values = w.rows[shown], w.columns[shown], w.values[shown]
    widths = 3.0 * values / max(values, default=1.0)
    for a, b, width in zip(places[start], places[to], widths, strict=True):
        # Directed edges bend so that both directions show; a torus's wrap around the grid.
        wraps = "torus" in topology.name and np.linalg.norm(b - a) > 1
        ax.add_patch(
            FancyArrowPatch(
                tuple(a),
                tuple(b),
                arrowstyle="-|>" if directed else "-",
                mutation_scale=11,
                shrinkA=8,
                shrinkB=9,
                connectionstyle=f"arc3,rad={0.08 if directed else 0.18 if wraps else 0.0}",
                color=_EDGE,
                linewidth=max(0.4, width * (0.5 if directed else 1.0)),
                zorder=1,
            )
        )
    small = len(places) <= 16
    size = 300 if small else 110
    ax.scatter(places[:, 0], places[:, 1], s=size, c=_NODE, edgecolors=_INK, linewidths=1, zorder=3)
    for node, (x, y) in enumerate(places):
        ax.text(x, y, str(node), ha="center", va="center", fontsize=9 if small else 6, zorder=4)
