"""Figures of the large-batch study: accuracy and DecentLaM's lead against the batch."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decentlam.lab import style
from decentlam.lab.accuracy import AVERAGED, NODES, leads, mean_and_spread, scores, where
from decentlam.lab.studies import paper
from decentlam.lab.study import Record

_TITLES = {"iid": "Shards drawn at random (iid)", "label-sorted:2": "Two pieces of sorted labels"}


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """`accuracy` and `lead` of the trend, `fixed` for the fixed setting."""
    trend, fixed = where(records, part="trend"), where(records, part="fixed")
    found = {}
    if trend:
        found["accuracy"] = accuracy(trend)
    if {"decentlam", "dmsgd"} <= {r["method"] for r in trend}:
        found["lead"] = lead(trend)
    if fixed:
        found["fixed"] = dots(fixed)
    return found


def accuracy(records: Sequence[Record]) -> Figure:
    """A panel per kind of shards: the averaged model's accuracy, with the spread over seeds."""
    kinds = list(dict.fromkeys(sorted(r["shards"] for r in records)))
    figure, panels = style.axes(len(kinds), (10.4, 5.0))
    methods = list(dict.fromkeys(r["method"] for r in records))
    for ax, shards in zip(panels, kinds, strict=True):
        for place, method in enumerate(methods):
            mine = where(records, shards=shards, method=method)
            shift = 1.025 ** (place - (len(methods) - 1) / 2)  # side by side, not on one another
            _draw_spread(ax, mine, shift, method)
        ax.set(title=_TITLES.get(shards, shards), xlabel="total batch", ylabel=_PERCENT)
        _batch_axis(ax, records)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure


_PERCENT = "test accuracy of the averaged model, %"


def _draw_spread(ax: Axes, records: Sequence[Record], shift: float, method: str) -> None:
    batches, means, spreads = [], [], []
    for batch in sorted({r["batch"] for r in records}):
        found = scores(where(records, batch=batch))
        if found:
            mean, spread = mean_and_spread(found)
            batches.append(batch * shift)
            means.append(mean)
            spreads.append(spread)
    ax.errorbar(batches, means, spreads, capsize=2, label=style.label(method), **style.both(method))


def _batch_axis(ax: Axes, records: Sequence[Record]) -> None:
    batches = sorted({r["batch"] for r in records})
    ax.set_xscale("log")
    ax.set_xticks(batches, [f"{batch:,}" for batch in batches])
    ax.set_xticks([], minor=True)


def lead(records: Sequence[Record]) -> Figure:
    """Left what was measured here, right the paper's ImageNet."""
    figure, (ours, theirs) = style.axes(2, (9.6, 4.4))
    for shards, shade in (("label-sorted:2", style.color("decentlam")), ("iid", style.GREY)):
        for score, dash, words in ((AVERAGED, "-", "averaged"), (NODES, "--", "nodes")):
            points = []
            for batch in sorted({r["batch"] for r in records}):
                here = where(records, shards=shards, batch=batch)
                if found := leads(here, "decentlam", "dmsgd", score):
                    points.append((batch, *mean_and_spread(found)))
            if points:
                batches, means, spreads = zip(*points, strict=True)
                ours.errorbar(
                    batches,
                    means,
                    spreads,
                    color=shade,
                    linestyle=dash,
                    marker="o",
                    markersize=5,
                    capsize=3,
                    label=f"{shards}, {words}",
                )
    _batch_axis(ours, records)
    ours.set(xlabel="total batch", ylabel="points", title="DecentLaM's lead over DmSGD, here")
    ours.legend(fontsize=9, frameon=False)
    pair = paper.IMAGENET["decentlam"], paper.IMAGENET["dmsgd"]
    theirs.plot(
        list(pair[0]),
        [pair[0][batch] - pair[1][batch] for batch in pair[0]],
        color=style.color("decentlam"),
        marker="o",
        markersize=5,
    )
    theirs.set(xlabel="total batch", title="The paper's, ImageNet and ResNet-50")
    for ax in (ours, theirs):
        ax.axhline(0, color=style.GREY, linewidth=0.8)
    return figure


def dots(records: Sequence[Record]) -> Figure:
    """A line per method, best at the top: every seed, filled for the average, hollow for nodes."""
    figure, (ax,) = style.axes(1, (7.2, 4.4))
    methods = list(dict.fromkeys(r["method"] for r in records))
    by_mean = sorted(
        methods,
        key=lambda method: mean_and_spread(scores(where(records, method=method)) or [0.0])[0],
    )
    for height, method in enumerate(by_mean):
        mine = where(records, method=method)
        averaged, nodes = scores(mine), scores(mine, NODES)
        look = style.points(method) | {"markersize": 7}
        hollow = look | {"markerfacecolor": "white"}
        ax.plot(nodes, [height - 0.12] * len(nodes), **hollow)
        ax.plot(averaged, [height + 0.12] * len(averaged), **look)
        if not averaged:
            ax.annotate("diverges", (0.02, height), xycoords=("axes fraction", "data"), fontsize=9)
    ax.set_yticks(range(len(by_mean)), [style.label(method) for method in by_mean])
    ax.set(xlabel="test accuracy, %: filled of the averaged model, hollow of the nodes' own")
    batch, lr = records[0]["batch"], records[0]["lr"]
    ax.set_title(f"{records[0]['shards']}, batch {batch:,}, lr {lr:g}: every seed")
    return figure
