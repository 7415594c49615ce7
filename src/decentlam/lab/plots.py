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

_ERROR = r"relative error  $\frac{1}{n}\sum_i \|x_i - x^*\|^2 \,/\, \|x^*\|^2$"
_FLOOR = 1e-32  # below round-off; a logarithmic axis has no zero


def regression(records: Sequence[Record]) -> dict[str, Figure]:
    """`figure3`: the paper's three methods and their closed-form limits; `methods`: all."""
    figures = {"methods": convergence(records, "Linear regression with full gradients")}
    paper = [r for r in records if r["method"] in ("dsgd", "dmsgd", "decentlam")]
    early = [r for r in paper if r["kind"] == "limit" or r["step"] <= 600]
    if early:
        figures["figure3"] = convergence(early, "DecentLaM: DmSGD's speed, DSGD's bias")
        _draw_limits(figures["figure3"].axes[0], early)
    return figures


def convergence(records: Sequence[Record], title: str) -> Figure:
    """One curve per method: relative error against steps."""
    figure, (ax,) = style.axes(1, (6.4, 4.4))
    methods = list(dict.fromkeys(r["method"] for r in records))
    for method in methods:
        curve = [r for r in records if r["kind"] == "curve" and r["method"] == method]
        errors = [max(r["error"], _FLOOR) for r in curve]
        steps = [r["step"] for r in curve]
        ax.semilogy(steps, errors, label=style.label(method), **style.line(method))
    ax.set(xlabel="step", ylabel=_ERROR, title=title, xlim=(0, None))
    ax.legend(fontsize=8, ncols=2 if len(methods) > 5 else 1, frameon=False)
    return figure


def _draw_limits(ax: Axes, records: Sequence[Record]) -> None:
    """A dotted line and its value at every fixed point; equal ones share a text."""
    limits = {r["method"]: r["closed_form"] for r in records if r["kind"] == "limit"}
    for value in dict.fromkeys(f"{limit:.6g}" for limit in limits.values() if limit):
        methods = [method for method, limit in limits.items() if limit and f"{limit:.6g}" == value]
        ax.axhline(float(value), color=style.color(methods[-1]), linewidth=1, linestyle=":")
        ax.annotate(
            f"closed form, {' and '.join(map(style.label, methods))}: {float(value):.4g}",
            (0.99, float(value)),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=8,
        )


def bias(records: Sequence[Record]) -> dict[str, Figure]:
    """Four panels: the bias against 1/(1-beta), lr, 1/(1-rho) and b^2, with the predictions."""
    figure, panels = style.axes(4, (9.2, 7.2))
    x_labels = {
        "beta": r"$1/(1-\beta)$",
        "lr": r"learning rate $\gamma$",
        "rho": r"$1/(1-\rho)$",
        "b2": r"data inconsistency $b^2$",
    }
    methods = list(dict.fromkeys(r["method"] for r in records))
    for ax, (sweep, x_label) in zip(panels, x_labels.items(), strict=True):
        for method in methods:
            mine = [r for r in records if (r["sweep"], r["method"]) == (sweep, method)]
            _draw_sweep(ax, sorted(mine, key=lambda r: r["x"]), method)
        _draw_order(ax, [r for r in records if r["sweep"] == sweep])
        ax.set(xscale="log", yscale="log", xlabel=x_label)
        ax.set_ylabel(r"limit of $\frac{1}{n}\sum_i \|x_i - x^*\|^2$")
    handles = [Line2D([], [], label=style.label(m), **style.points(m)) for m in methods]
    handles += [
        Line2D([], [], color=style.GREY, label="closed form"),
        Line2D([], [], color=style.GREY, linestyle=":", label="slope of the paper's order"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return {"bias": figure}


def _draw_sweep(ax: Axes, records: Sequence[Record], method: str) -> None:
    """Measurements as markers, the closed form as a line; other graphs stand alone, hollow."""
    if not records:
        return
    series = [r for r in records if r["in_fit"] or r["sweep"] != "rho"]
    others = [r for r in records if r not in series]
    if len(series) == 1:  # DSGD has no momentum: one level
        ax.axhline(series[0]["closed_form"], **style.line(method))
    ax.plot([r["x"] for r in series], [r["closed_form"] for r in series], **style.line(method))
    ax.plot([r["x"] for r in series], [r["measured"] for r in series], **style.points(method))
    hollow = style.points(method) | {"markerfacecolor": "white"}
    ax.plot([r["x"] for r in others], [r["measured"] for r in others], **hollow)
    for r in others if method == "decentlam" else []:
        ax.annotate(
            r["topology"],
            (r["x"], r["measured"]),
            xytext=(0, -11),
            textcoords="offset points",
            horizontalalignment="center",
            fontsize=7,
            color=style.color(method),
        )


def _draw_order(ax: Axes, records: Sequence[Record]) -> None:
    """The slope the paper predicts for DmSGD and DecentLaM, through the point it should fit best."""
    for method in ("dmsgd", "decentlam"):
        mine = [r for r in records if r["method"] == method and r["in_fit"]]
        if mine:
            # Small lr / ((1-beta)(1-rho)) is where the orders hold: the smallest x in every sweep.
            anchor = min(mine, key=lambda r: r["x"])
            x = np.array([min(r["x"] for r in mine), max(r["x"] for r in mine)])
            y = anchor["closed_form"] * (x / anchor["x"]) ** anchor["power"]
            ax.plot(x, y, color=style.GREY, linestyle=":", linewidth=1.6, zorder=5)


def speedup(records: Sequence[Record]) -> dict[str, Figure]:
    """A panel per corollary: the error against n, mean and spread over runs, and the bound."""
    corollaries = list(dict.fromkeys(r["corollary"] for r in records))
    figure, panels = style.axes(len(corollaries), (9.2, 4.0))
    for ax, corollary in zip(panels, corollaries, strict=True):
        here = [r for r in records if r["corollary"] == corollary]
        methods = list(dict.fromkeys(r["method"] for r in here))
        for place, method in enumerate(methods):
            mine = [r for r in here if r["method"] == method]
            shift = 1.04 ** (place - (len(methods) - 1) / 2)  # side by side, not on one another
            n = [r["nodes"] * shift for r in mine]
            means = [np.mean(r["errors"]) for r in mine]
            spread = [np.std(r["errors"]) for r in mine]
            ax.plot(n, means, **style.line(method))
            ax.errorbar(n, means, spread, capsize=2, label=style.label(method), **style.points(method))
        n = sorted({r["nodes"] for r in here})
        bound = here[0]["bound_slope"]
        first = np.mean(here[0]["errors"])
        ax.plot(
            n,
            [first * (k / n[0]) ** bound for k in n],
            color=style.GREY,
            linestyle=":",
            label=f"slope {bound:g}",
        )
        ax.set(xscale="log", yscale="log", xlabel="nodes $n$", title=corollary.capitalize())
        ax.set_ylabel(here[0]["criterion"])
        ax.set_xticks(n, [str(k) for k in n])
        ax.minorticks_off()
        ax.legend(fontsize=8, frameon=False)
    return {"speedup": figure}
