"""Tables 1 and 3: what a larger batch costs each method, on Fashion-MNIST with 8 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from decentlam.lab.accuracy import AVERAGED, NODES, cell, leads, signed, verdict, where
from decentlam.lab.recipes import Recipe
from decentlam.lab.studies import large_batch_plots as plots
from decentlam.lab.studies import paper
from decentlam.lab.studies.common import FASHION, METHODS, check_data, fitting, seeds_from
from decentlam.lab.study import Record, Study, Tick, silent
from decentlam.lab.sweep import sweep


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
    """A record per run; `part` says what it was for, `chosen` whether the table shows it."""
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
    """One run: a tenth of it warms up, then the rate stays."""
    epochs = setting.fixed_epochs if fixed else setting.epochs
    return Recipe(
        method=method,
        topology=setting.topology,
        nodes=setting.nodes,
        model=setting.model,
        data=setting.data,
        data_path=setting.data_path,
        shards=shards,
        batch=batch,
        epochs=epochs,
        lr=_scaled(setting, batch) * factor,
        momentum=setting.momentum,
        stable="ignore",  # as printed, stable or not
        batch_norm="estimate",
        hyper=(("trust", setting.lars_trust),) if method == "pmsgd-lars" else (),
        warmup_epochs=epochs / 10,
        seed=seed,
        evaluate_every=epochs,
        log_every=50,
    )


def choose(tried: Sequence[Record]) -> Record:
    """The run whose averaged model is best; of equal ones that with the lowest rate."""
    return max(tried, key=lambda r: (-1.0 if r[AVERAGED] is None else r[AVERAGED], -r["lr"]))


def _scaled(setting: LargeBatch, batch: int) -> float:
    return setting.lr * batch / setting.batches[-1]


def _of(records: Sequence[Record], method: str, shards: str, batch: int) -> list[Record]:
    return where(records, method=method, shards=shards, batch=batch)


def table(records: Sequence[Record]) -> list[Record]:
    """Test accuracy in %, of the averaged model and of the nodes' own ones, and the rate."""
    shown = where(records, chosen=True)
    parts = dict.fromkeys((r["part"], r["shards"]) for r in shown)
    batches = sorted({r["batch"] for r in shown})
    rows = []
    for part, shards in sorted(parts):
        for method in dict.fromkeys(r["method"] for r in shown):
            mine = where(shown, part=part, shards=shards, method=method)
            row: Record = {"part": part, "shards": shards, "method": method}
            for batch in batches:
                row[f"averaged,_batch_{batch:,}"] = cell(where(mine, batch=batch))
            for batch in batches:
                row[f"nodes,_batch_{batch:,}"] = cell(where(mine, batch=batch), NODES)
            rates = [{r["lr"] for r in where(mine, batch=batch)} for batch in batches]
            row["lr"] = " / ".join(f"{lr:g}" for found in rates for lr in found)
            row["paper:_2K/8K/16K/32K"] = paper.line(paper.IMAGENET.get(method))
            rows.append(row)
    return rows


def notes(setting: LargeBatch, records: Sequence[Record]) -> list[str]:
    largest = setting.batches[-1]
    tried = ", ".join(f"{setting.lr * factor:g}" for factor in setting.factors)
    return [
        f"Top-1 on the test set of {setting.data} in %, mean ± standard deviation over seeds "
        f"{', '.join(map(str, setting.seeds))}, of the mean of all nodes' models (averaged) and of "
        f"their own ones in the mean (nodes); {setting.model}, {setting.nodes} nodes, "
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
    """How often the choice fell on the end of the grid, where a better rate may lie beyond."""
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
    """Whether DecentLaM's lead over DmSGD grows with the batch."""
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


def figures(records: Sequence[Record]) -> dict[str, Any]:
    return plots.figures(where(records, chosen=True))


STUDY = Study(
    name="large-batch",
    summary="accuracy of the ten methods as the batch grows, Fashion-MNIST (Tables 1 and 3)",
    recipe=recipe,
    run=run,
    table=table,
    notes=notes,
    figures=figures,
    resumable=True,
)
