"""One style for every figure: a color and dash per method, light grids, no global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GREY = "#777777"

# Paul Tol's "muted" colors, which color-blind readers can tell apart; dashes help where
# methods lie on one another, and in print.
_STYLES: dict[str, tuple[str, str, Any]] = {
    "pmsgd": ("PmSGD", "#000000", "-"),
    "pmsgd-lars": ("PmSGD + LARS", GREY, (0, (3, 2))),
    "dsgd": ("DSGD", "#88CCEE", "-"),
    "dmsgd": ("DmSGD", "#CC6677", "-"),
    "da-dmsgd": ("DA-DmSGD", "#999933", (0, (5, 2))),
    "awc-dmsgd": ("AWC-DmSGD", "#882255", (0, (5, 2))),
    "slowmo": ("SlowMo", "#AA4499", (0, (1, 1))),
    "qg-dmsgd": ("QG-DmSGD", "#44AA99", (0, (2, 2))),
    "d2-dmsgd": ("D2-DmSGD", "#117733", (0, (5, 1, 1, 1))),
    "gt-dmsgd": ("GT-DmSGD", "#DDAA33", (0, (5, 1, 1, 1))),
    "decentlam": ("DecentLaM", "#332288", "-"),
    "decentlam-exact": ("DecentLaM (exact)", "#5599DD", (0, (3, 1, 1, 1))),
    "decentlam-steady": ("DecentLaM (steady)", "#6655CC", (0, (4, 1))),
}


def _style(method: str) -> tuple[str, str, Any]:
    """Return label, color and dash; somebody's own method is grey."""
    return _STYLES.get(method, (method, GREY, "-"))


def label(method: str) -> str:
    """Return the method's name as the paper spells it."""
    return _style(method)[0]


def color(method: str) -> str:
    return _style(method)[1]


def line(method: str) -> dict[str, Any]:
    """Return the arguments of `plot` for a curve of the method."""
    _, shade, dash = _style(method)
    return {"color": shade, "linestyle": dash, "linewidth": 2.2 if method == "decentlam" else 1.5}


def plain_ticks(ax: Axes, values: Sequence[float]) -> None:
    """Put these values, and no others, on a logarithmic x-axis as plain numbers."""
    low, high = ax.get_xlim()
    shown = [value for value in values if low <= value <= high]
    ax.set_xticks(shown, [f"{value:g}" for value in shown])
    ax.set_xticks([], minor=True)


def axes(count: int, size: tuple[float, float], columns: int = 2) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many panels."""
    figure = Figure(figsize=size, layout="constrained")
    columns = min(columns, count)
    grid = figure.subplots(-(-count // columns), columns, squeeze=False).flatten()
    for ax in grid[count:]:
        ax.remove()
    for ax in grid[:count]:
        ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(grid[:count])


def save(figure: Figure, path: Path) -> Path:
    """Write the figure to a file; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    with matplotlib.rc_context({"svg.hashsalt": "decentlam"}):
        figure.savefig(path, dpi=150, metadata=metadata)
    return path
