"""Tables 1 and 3: what a larger batch costs each method, on Fashion-MNIST with 8 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decentlam.lab import plot_style
from decentlam.lab.recipes import Recipe
from decentlam.lab.studies import paper
from decentlam.lab.studies.common import (
    AVERAGED,
    FASHION,
    METHODS,
    NODES,
    accuracy_note,
    cells_by_batch,
    check_data,
    dot_panels,
    fitting,
    leads,
    mean_and_spread,
    scores,
    seeds_from,
    signed,
    study_recipe,
    verdict,
    where,
)
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.sweep import sweep

_TITLES = {"iid": "Shards drawn at random (iid)", "label-sorted:2": "Two pieces of sorted labels"}
_PERCENT = "test accuracy of the averaged model, %"


@dataclass(frozen=True)
class LargeBatch:
    """Two parts: a trend over batches, rates chosen per method, and one fixed setting in depth.

    In the trend the rate follows the batch: `lr` is that of the largest one, and `factors` of it
    are tried for every method on the first seed.
    """

    data: str = FASHION
    data_path: str | None = None
    model: str = "mlp"
    nodes: int = 8
    topology: str = "ring"
    methods: tuple[str, ...] = METHODS
    shards: tuple[str, ...] = ("iid", "label-sorted:2")
    batches: tuple[int, ...] = (512, 2000, 8000)
    lr: float = 0.05
    factors: tuple[float, ...] = (0.25, 1.0, 4.0)
    momentum: float = 0.9
    epochs: float = 10.0
    fixed_epochs: float = 20.0  # of the fixed setting: last shards, largest batch, lr as it is
    seeds: tuple[int, ...] = (0, 1, 2)
    # LARS makes every step lr * trust * |x| long: 1 % at lr 0.05, ten times that with momentum.
    lars_trust: float = 0.2


def recipe(
    nodes: int | None = None,
    seed: int = 0,
    quick: bool = False,
    data: str = FASHION,
    data_path: str | None = None,
) -> LargeBatch:
    nodes, seeds = 8 if nodes is None else nodes, seeds_from(seed, 2 if quick else 3)
    if not quick:
        batches = fitting(nodes, *LargeBatch.batches)
        return LargeBatch(data, data_path, nodes=nodes, batches=batches, seeds=seeds)
    return LargeBatch(
        data="digits",
        nodes=nodes,
        methods=("pmsgd", "pmsgd-lars", "dmsgd", "slowmo", "qg-dmsgd", "decentlam"),
        batches=fitting(nodes, 128, 1024),
        factors=(1.0, 4.0),
        epochs=3.0,
        fixed_epochs=6.0,
        seeds=seeds,
    )


def run(setting: LargeBatch, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    """Return a record per run; `part` is what it was for, `chosen` whether the table shows it."""
    check_data(setting.data, setting.data_path)
    first, rest = setting.seeds[0], setting.seeds[1:]
    fixed = [
        make(setting, method, setting.shards[-1], setting.batches[-1], 1.0, seed, fixed=True)
        for method in setting.methods
        for seed in setting.seeds
    ]
    cases = [
        (method, shards, batch)
        for shards in reversed(setting.shards)
        for batch in reversed(setting.batches)  # the cheapest first
        for method in setting.methods
    ]
    grid = [make(setting, *case, factor, first) for case in cases for factor in setting.factors]
    later = len(cases) * len(rest)

    def before(done: int, total: int, what: str) -> None:
        tick(done, total + later, what)

    def after(done: int, total: int, what: str) -> None:
        tick(len(found) + done, len(found) + later, what)

    found = sweep([*fixed, *grid], directory, before)
    records = [{"part": "fixed", "chosen": True, **r} for r in found[: len(fixed)]]
    tried = found[len(fixed) :]
    best = {case: choose(_of(tried, *case)) for case in cases}
    repeats = [
        make(setting, *case, best[case]["lr"] / _scaled(setting, case[2]), seed)
        for case in cases
        for seed in rest
    ]
    repeated = sweep(repeats, directory, after)
    records += [{"part": "trend", "chosen": r in best.values(), **r} for r in tried]
    return records + [{"part": "trend", "chosen": True, **r} for r in repeated]


def make(
    setting: LargeBatch,
    method: str,
    shards: str,
    batch: int,
    factor: float,
    seed: int,
    fixed: bool = False,
) -> Recipe:
    """Return the recipe of one run; `factor` is that of the scaled rate."""
    return study_recipe(
        setting,
        method=method,
        shards=shards,
        batch=batch,
        epochs=setting.fixed_epochs if fixed else setting.epochs,
        lr=_scaled(setting, batch) * factor,
        hyper=(("trust", setting.lars_trust),) if method == "pmsgd-lars" else (),
        seed=seed,
    )


def choose(tried: Sequence[Record]) -> Record:
    """Return the run whose averaged model is best; of equal ones that with the lowest rate."""
    return max(tried, key=lambda r: (-1.0 if r[AVERAGED] is None else r[AVERAGED], -r["lr"]))


def _scaled(setting: LargeBatch, batch: int) -> float:
    return setting.lr * batch / setting.batches[-1]


def _of(records: Sequence[Record], method: str, shards: str, batch: int) -> list[Record]:
    return where(records, method=method, shards=shards, batch=batch)


def table(records: Sequence[Record]) -> list[Record]:
    """Return test accuracies in %, of the averaged model and the nodes' own, and the rate."""
    shown = where(records, chosen=True)
    parts = dict.fromkeys((r["part"], r["shards"]) for r in shown)
    batches = sorted({r["batch"] for r in shown})
    rows = []
    for part, shards in sorted(parts):
        for method in dict.fromkeys(r["method"] for r in shown):
            mine = where(shown, part=part, shards=shards, method=method)
            row: Record = {"part": part, "shards": shards, "method": method}
            row |= cells_by_batch(mine, batches)
            rates = [{r["lr"] for r in where(mine, batch=batch)} for batch in batches]
            row["lr"] = " / ".join(f"{lr:g}" for found in rates for lr in found)
            row["paper:_2K/8K/16K/32K"] = paper.line(paper.IMAGENET.get(method))
            rows.append(row)
    return rows


def notes(setting: LargeBatch, records: Sequence[Record]) -> list[str]:
    largest = setting.batches[-1]
    tried = ", ".join(f"{setting.lr * factor:g}" for factor in setting.factors)
    return [
        f"{accuracy_note(setting, f' of {setting.data}')}; {setting.model}, {setting.nodes} nodes, "
        f"{setting.topology}, momentum {setting.momentum:g}; a tenth of the epochs is warm-up, "
        "then the rate is constant. A seed decides start, shards and order of samples.",
        f"Trend: {setting.epochs:g} epochs. Every method tries lr {tried} at batch {largest:,} "
        f"and in proportion at the others, on seed {setting.seeds[0]}; the rate with the best "
        "averaged accuracy on the test set is used for all seeds, that one included. "
        + _edges(setting, records),
        *(_trend(setting, shards, where(records, part="trend")) for shards in setting.shards),
        *_fixed(setting, where(records, part="fixed")),
        f"pmsgd-lars runs with trust {setting.lars_trust:g}, other methods with their defaults; "
        "no weight decay.",
        "The paper's figures in the table are of ImageNet with ResNet-50 on the symmetric "
        "exponential graph (Table 3): larger data, a larger model, rates that decay. Compare the "
        "order of methods, not the numbers. Table 1 has CIFAR-10 with ResNet-20, 2K / 8K: "
        + ", ".join(f"{method} {paper.line(row)}" for method, row in paper.CIFAR10.items())
        + ".",
    ]


def _edges(setting: LargeBatch, records: Sequence[Record]) -> str:
    """Say how often the choice fell on the end of the grid: a better rate may lie beyond."""
    first = where(records, part="trend", chosen=True, seed=setting.seeds[0])
    ends = {"lowest": min(setting.factors), "highest": max(setting.factors)}
    counts = {
        end: sum(abs(r["lr"] / _scaled(setting, r["batch"]) / f - 1) < 1e-9 for r in first)
        for end, f in ends.items()
    }
    return (
        f"Of {len(first)} choices {counts['lowest']} are the lowest rate, {counts['highest']} the "
        "highest."
    )


def _trend(setting: LargeBatch, shards: str, records: Sequence[Record]) -> str:
    """Say whether DecentLaM's lead over DmSGD grows with the batch."""
    if not {"decentlam", "dmsgd"} <= set(setting.methods):
        return f"{shards}: no DecentLaM and DmSGD to compare."
    shown = where(records, chosen=True)

    def lead(batch: int, score: str) -> list[float]:
        return leads(where(shown, shards=shards, batch=batch), "decentlam", "dmsgd", score)

    parts = []
    for score, whose in ((AVERAGED, "averaged"), (NODES, "nodes")):
        values = {batch: lead(batch, score) for batch in setting.batches}
        steps = [
            f"from {a:,} to {b:,} it {verdict(values[a], values[b])}"
            for a, b in pairwise(setting.batches)
        ]
        parts.append(
            f"{whose} "
            + ", ".join(f"{signed(found)} at {batch:,}" for batch, found in values.items())
            + f" ({'; '.join(steps)})"
        )
    return f"{shards}: DecentLaM's lead over DmSGD in points, seed by seed: {'; '.join(parts)}."


def _fixed(setting: LargeBatch, records: Sequence[Record]) -> list[str]:
    rivals = [m for m in setting.methods if m != "decentlam" and not m.startswith("pmsgd")]
    if "decentlam" not in setting.methods or not rivals:
        return []
    parts = []
    for method in rivals:
        found = [leads(records, "decentlam", method, score) for score in (AVERAGED, NODES)]
        ahead = all(values and min(values) > 0 for values in found)
        parts.append(
            f"{method} by {signed(found[0])} (averaged) and {signed(found[1])} (nodes)"
            + ("" if ahead else ", not on every seed")
        )
    return [
        f"Fixed: batch {setting.batches[-1]:,}, {setting.shards[-1]}, lr {setting.lr:g}, "
        f"{setting.fixed_epochs:g} epochs, the same for every method. DecentLaM leads "
        + "; ".join(parts)
        + "."
    ]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Return `accuracy` and `lead` of the trend, and `fixed` for the fixed setting."""
    shown = where(records, chosen=True)
    trend, fixed = where(shown, part="trend"), where(shown, part="fixed")
    found = {}
    if trend:
        found["accuracy"] = _accuracy_figure(trend)
    if {"decentlam", "dmsgd"} <= {r["method"] for r in trend}:
        found["lead"] = _lead_figure(trend)
    if fixed:
        batch, lr = fixed[0]["batch"], fixed[0]["lr"]
        title = f"{fixed[0]['shards']}, batch {batch:,}, lr {lr:g}: every seed"
        found["fixed"] = dot_panels({title: fixed}, "method")
    return found


def _accuracy_figure(records: Sequence[Record]) -> Figure:
    """Draw a panel per kind of shards: the averaged model's accuracy and its spread over seeds."""
    kinds = list(dict.fromkeys(sorted(r["shards"] for r in records)))
    figure, panels = plot_style.axes(len(kinds), (10.4, 5.0))
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


def _draw_spread(ax: Axes, records: Sequence[Record], shift: float, method: str) -> None:
    batches, means, spreads = [], [], []
    for batch in sorted({r["batch"] for r in records}):
        found = scores(where(records, batch=batch))
        if found:
            mean, spread = mean_and_spread(found)
            batches.append(batch * shift)
            means.append(mean)
            spreads.append(spread)
    ax.errorbar(
        batches,
        means,
        spreads,
        capsize=2,
        label=plot_style.label(method),
        **plot_style.both(method),
    )


def _batch_axis(ax: Axes, records: Sequence[Record]) -> None:
    batches = sorted({r["batch"] for r in records})
    ax.set_xscale("log")
    ax.set_xticks(batches, [f"{batch:,}" for batch in batches])
    ax.set_xticks([], minor=True)


def _lead_figure(records: Sequence[Record]) -> Figure:
    """Draw DecentLaM's lead: left what was measured, right the paper's on ImageNet."""
    figure, (ours, theirs) = plot_style.axes(2, (9.6, 4.4))
    for shards, shade in (
        ("label-sorted:2", plot_style.color("decentlam")),
        ("iid", plot_style.GREY),
    ):
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
        color=plot_style.color("decentlam"),
        marker="o",
        markersize=5,
    )
    theirs.set(xlabel="total batch", title="The paper's, ImageNet and ResNet-50")
    for ax in (ours, theirs):
        ax.axhline(0, color=plot_style.GREY, linewidth=0.8)
    return figure


_SUMMARY = "accuracy of the ten methods as the batch grows, Fashion-MNIST (Tables 1 and 3)"
STUDY = Study("large-batch", _SUMMARY, recipe, run, table, notes, figures, resumable=True)
