"""The studies' figures, as pure functions of records: nothing is computed or kept here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from decentlam.lab import style

Record = dict[str, Any]

_ERROR = r"relative error: node mean of $\|x_i - x^*\|^2 \,/\, \|x^*\|^2$"
_BIAS = r"limit of the node mean of $\|x_i - x^*\|^2$"
_FLOOR = 1e-32  # below round-off; a logarithmic axis has no zero


def regression(records: Sequence[Record]) -> dict[str, Figure]:
    """`methods`: all of them; `figure3`: the paper's three and their closed-form limits."""
    figure, panels = style.axes(2, (10.4, 4.8))
    for ax, title in zip(panels, ("The first 300 steps", "To the end"), strict=True):
        _draw_curves(ax, records)
        ax.set_title(title)
    panels[0].set(xlim=(0, 300), ylim=(3e-9, 2))
    panels[1].set_ylabel("")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    figures = {"methods": figure}
    paper = [r for r in records if r["method"] in ("dsgd", "dmsgd", "decentlam")]
    if paper:
        figures["figure3"] = convergence(paper, "DecentLaM: the speed of DmSGD, the bias of DSGD")
        figures["figure3"].axes[0].set_xlim(0, 400)
        _draw_limits(figures["figure3"].axes[0], paper)
    return figures


def convergence(records: Sequence[Record], title: str) -> Figure:
    """One curve per method: relative error against steps."""
    figure, (ax,) = style.axes(1, (6.4, 4.4))
    _draw_curves(ax, records)
    ax.set_title(title)
    ax.legend(fontsize=9, frameon=False)
    return figure


def _draw_curves(ax: Axes, records: Sequence[Record]) -> None:
    for method in dict.fromkeys(r["method"] for r in records):
        curve = [r for r in records if r["kind"] == "curve" and r["method"] == method]
        errors = [max(r["error"], _FLOOR) for r in curve]
        steps = [r["step"] for r in curve]
        ax.semilogy(steps, errors, label=style.label(method), **style.line(method))
    ax.set(xlabel="step", ylabel=_ERROR, xlim=(0, None))


def _draw_limits(ax: Axes, records: Sequence[Record]) -> None:
    """A dotted line and its value at every fixed point; equal ones share a text."""
    limits = {r["method"]: r["closed_form"] for r in records if r["kind"] == "limit"}
    for value in dict.fromkeys(f"{limit:.6g}" for limit in limits.values() if limit):
        methods = [method for method, limit in limits.items() if limit and f"{limit:.6g}" == value]
        ax.axhline(float(value), color=style.color(methods[-1]), linewidth=1, linestyle=":")
        ax.annotate(
            f"closed form of {' and '.join(map(style.label, methods))}: {float(value):.4g}",
            (0.99, float(value)),
            xycoords=("axes fraction", "data"),
            xytext=(0, -10),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=8,
        )


def bias(records: Sequence[Record]) -> dict[str, Figure]:
    """Four panels: the bias against 1/(1-beta), lr, 1/(1-rho) and b^2, with the predictions."""
    figure, panels = style.axes(4, (9.6, 7.6))
    x_labels = {
        "beta": r"$1/(1-\beta)$",
        "lr": r"learning rate",
        "rho": r"$1/(1-\rho)$: one graph at several rates, hollow: other graphs",
        "b2": r"data inconsistency $b^2$",
    }
    methods = list(dict.fromkeys(r["method"] for r in records))
    for ax, (sweep, x_label) in zip(panels, x_labels.items(), strict=True):
        ax.set(xscale="log", yscale="log", xlabel=x_label, ylabel=_BIAS)
        for method in methods:
            mine = [r for r in records if (r["sweep"], r["method"]) == (sweep, method)]
            _draw_sweep(ax, sorted(mine, key=lambda r: r["x"]), method)
        _draw_order(ax, [r for r in records if r["sweep"] == sweep])
        if sweep in ("beta", "rho"):
            style.plain_ticks(ax, (1, 2, 5, 10, 20, 50))
    handles = [Line2D([], [], label=style.label(m), **style.both(m)) for m in methods]
    handles += [
        Line2D([], [], label="measured", **style.points("pmsgd") | {"color": style.GREY}),
        Line2D([], [], label="closed form", color=style.GREY),
        Line2D([], [], label="the paper's order", color=style.GREY, **style.GUIDE),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return {"bias": figure}


def _draw_sweep(ax: Axes, records: Sequence[Record], method: str) -> None:
    """Measurements as markers, the closed form as a line; other graphs stand alone, hollow."""
    series = [r for r in records if r["in_fit"] or r["sweep"] != "rho"]
    others = [r for r in records if r not in series]
    if len(series) == 1:  # DSGD has no momentum: one level
        ax.axhline(series[0]["closed_form"], **style.line(method))
    ax.plot([r["x"] for r in series], [r["closed_form"] for r in series], **style.line(method))
    ax.plot([r["x"] for r in series], [r["measured"] for r in series], **style.points(method))
    hollow = style.points(method) | {"markerfacecolor": "white"}
    ax.plot([r["x"] for r in others], [r["measured"] for r in others], **hollow)
    for r in others if method == "dmsgd" else []:
        ax.annotate(
            r["topology"],
            (r["x"], r["measured"]),
            xytext=(0, 6),
            textcoords="offset points",
            horizontalalignment="center",
            fontsize=8,
        )


def _draw_order(ax: Axes, records: Sequence[Record]) -> None:
    """The paper's slope for DmSGD and DecentLaM, through their leftmost point.

    There lr / ((1-beta)(1-rho)) is smallest, which is where the orders hold.
    """
    for method in ("dmsgd", "decentlam"):
        mine = sorted((r for r in records if r["method"] == method), key=lambda r: r["x"])
        mine = [r for r in mine if r["in_fit"] or r["sweep"] != "rho"]
        if mine:
            x = np.array([mine[0]["x"], mine[-1]["x"]])
            y = mine[0]["closed_form"] * (x / x[0]) ** mine[0]["power"]
            ax.plot(x, y, color=style.GREY, zorder=5, **style.GUIDE)


def speedup(records: Sequence[Record]) -> dict[str, Figure]:
    """A panel per corollary: the error against n, mean and spread over runs, and the bound."""
    corollaries = list(dict.fromkeys(r["corollary"] for r in records))
    figure, panels = style.axes(len(corollaries), (9.6, 4.2))
    for ax, corollary in zip(panels, corollaries, strict=True):
        here = [r for r in records if r["corollary"] == corollary]
        methods = list(dict.fromkeys(r["method"] for r in here))
        for place, method in enumerate(methods):
            mine = [r for r in here if r["method"] == method]
            shift = 1.05 ** (place - (len(methods) - 1) / 2)  # side by side, not on one another
            n = [r["nodes"] * shift for r in mine]
            means, spread = ([f(r["errors"]) for r in mine] for f in (np.mean, np.std))
            ax.plot(n, means, **style.line(method))
            ax.errorbar(
                n, means, spread, capsize=2, label=style.label(method), **style.points(method)
            )
        counts = sorted({r["nodes"] for r in here})
        slope, first = here[0]["bound_slope"], float(np.mean(here[0]["errors"]))
        bound = [first * (n / counts[0]) ** slope for n in counts]
        ax.plot(counts, bound, color=style.GREY, label=f"slope {slope:g}", **style.GUIDE)
        ax.set(xscale="log", yscale="log", xlabel="nodes", ylabel=here[0]["criterion"])
        ax.set_title(f"{corollary.capitalize()}: error of the nodes' average")
        style.plain_ticks(ax, counts)
        ax.legend(fontsize=9, frameon=False)
    return {"speedup": figure}
