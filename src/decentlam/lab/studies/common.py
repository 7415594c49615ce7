"""What the studies that train share: the paper's methods, seeds, data, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from decentlam.lab import style
from decentlam.lab.accuracy import AVERAGED, NODES, scores, where
from decentlam.lab.data import load
from decentlam.lab.study import Record

METHODS = (
    "pmsgd",
    "pmsgd-lars",
    "dsgd",
    "dmsgd",
    "da-dmsgd",
    "awc-dmsgd",
    "slowmo",
    "qg-dmsgd",
    "d2-dmsgd",
    "decentlam",
)


def seeds_from(seed: int, count: int) -> tuple[int, ...]:
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    return tuple(range(seed, seed + count))


def fitting(nodes: int, *batches: int) -> tuple[int, ...]:
    """The batches, or a little less, so that all nodes get equal shares."""
    return tuple(nodes * max(1, batch // nodes) for batch in batches)


FASHION = "fashion-mnist"  # what the studies train on unless told otherwise


def check_data(name: str, path: str | None) -> None:
    """Reads the data once before anything is started, and says what to do without it."""
    try:
        load(name, path)
    except ValueError as error:
        raise ValueError(
            f"{error}. Or try --quick, which makes do with the digits inside scikit-learn"
        ) from None


def dot_panels(
    panels: Mapping[str, Sequence[Record]],
    rows: str,
    keys: tuple[str, str] = (AVERAGED, NODES),
    what: str = "test accuracy, %",
) -> Figure:
    """A panel per title, a band per value of `rows`: every seed, filled for the averaged model,
    hollow for the mean of the nodes' own ones; `keys` are the two scores."""
    names = {title: list(dict.fromkeys(r[rows] for r in found)) for title, found in panels.items()}
    methods = list(dict.fromkeys(r["method"] for found in panels.values() for r in found))
    height = 1.4 + 0.85 * max(map(len, names.values()))
    figure, axes = style.axes(len(panels), (10.4, height))
    for ax, (title, records) in zip(axes, panels.items(), strict=True):
        for band, name in enumerate(reversed(names[title])):
            here = where(records, **{rows: name})
            present = [method for method in methods if where(here, method=method)]
            for place, method in enumerate(reversed(present)):
                y = band + 0.7 * ((place + 0.5) / len(present) - 0.5)
                _draw_seeds(ax, where(here, method=method), method, y, keys)
            if band:
                ax.axhline(band - 0.5, color="#DDDDDD", linewidth=0.8)
        ax.grid(visible=False, axis="y")
        ax.set_yticks(range(len(names[title])), list(reversed(names[title])))
        ax.set(title=title, xlabel=what, ylim=(-0.5, len(names[title]) - 0.5))
    handles = [Line2D([], [], label=style.label(m), **style.points(m)) for m in methods]
    grey = style.points("pmsgd") | {"color": style.GREY, "marker": "o"}
    handles += [
        Line2D([], [], label="averaged model", **grey),
        Line2D([], [], label="nodes' own", **grey | {"markerfacecolor": "white"}),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_seeds(
    ax: Axes, records: Sequence[Record], method: str, y: float, keys: tuple[str, str]
) -> None:
    averaged, nodes = (scores(records, key) for key in keys)
    ax.plot(nodes, [y] * len(nodes), **style.points(method) | {"markerfacecolor": "white"})
    ax.plot(averaged, [y] * len(averaged), **style.points(method))
    if not averaged:
        ax.annotate(
            f"{style.label(method)} diverges",
            (0.02, y),
            xycoords=("axes fraction", "data"),
            verticalalignment="center",
            color=style.color(method),
            fontsize=8,
        )
