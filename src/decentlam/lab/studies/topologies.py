"""Table 5: DecentLaM and its rivals on four topologies, one of which changes at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from decentlam.algorithms import make as make_algorithm
from decentlam.analysis.stability import growth_rate
from decentlam.lab.recipes import Recipe
from decentlam.lab.studies import paper
from decentlam.lab.studies.common import (
    FASHION,
    accuracy_note,
    cells_by_batch,
    check_data,
    dot_panels,
    fitting,
    lead_text,
    leads,
    seeds_from,
    study_recipe,
    where,
)
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.sweep import sweep
from decentlam.topology import resolve

STEADY = "decentlam-steady"


@dataclass(frozen=True)
class Topologies:
    """Every method with the same values; the rate follows the batch, `lr` is the largest one's."""

    data: str = FASHION
    data_path: str | None = None
    model: str = "mlp"
    nodes: int = 8
    topologies: tuple[str, ...] = tuple(paper.TOPOLOGIES)
    methods: tuple[str, ...] = ("dmsgd", "qg-dmsgd", "decentlam")  # besides pmsgd, which needs none
    shards: str = "label-sorted:2"
    batches: tuple[int, ...] = (2000, 8000)
    lr: float = 0.05
    momentum: float = 0.9
    epochs: float = 20.0
    seeds: tuple[int, ...] = (0, 1, 2)


def recipe(
    nodes: int | None = None,
    seed: int = 0,
    quick: bool = False,
    data: str = FASHION,
    data_path: str | None = None,
) -> Topologies:
    nodes, seeds = 8 if nodes is None else nodes, seeds_from(seed, 2 if quick else 3)
    if not quick:
        batches = fitting(nodes, *Topologies.batches)
        return Topologies(data, data_path, nodes=nodes, batches=batches, seeds=seeds)
    batches = fitting(nodes, 128, 1024)
    return Topologies(data="digits", nodes=nodes, batches=batches, epochs=10.0, seeds=seeds)


def run(setting: Topologies, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    """Return a record per run, with the growth of disagreement that `decentlam.growth` predicts."""
    check_data(setting.data, setting.data_path)
    pairs = [("pmsgd", setting.topologies[0])]
    for topology in setting.topologies:
        changing = not resolve(topology, setting.nodes).static
        methods = (*setting.methods, STEADY) if changing else setting.methods
        pairs += [(method, topology) for method in methods]
    recipes = [
        make(setting, method, topology, batch, seed)
        for batch in reversed(setting.batches)
        for method, topology in pairs
        for seed in setting.seeds
    ]
    rates = {pair: _growth(setting, *pair) for pair in pairs}
    found = sweep(recipes, directory, tick)
    return [
        r
        | {"growth": rates[r["method"], r["topology"]]}
        | ({"topology": "all-reduce"} if r["method"] == "pmsgd" else {})
        for r in found
    ]


def make(setting: Topologies, method: str, topology: str, batch: int, seed: int) -> Recipe:
    lr = setting.lr * batch / setting.batches[-1]
    return study_recipe(setting, method=method, topology=topology, batch=batch, lr=lr, seed=seed)


def _growth(setting: Topologies, method: str, topology: str) -> float | None:
    if method == "pmsgd":
        return None
    network = resolve(topology, setting.nodes)
    return growth_rate(make_algorithm(method, setting.momentum), network).value


def table(records: Sequence[Record]) -> list[Record]:
    """Return test accuracies in %, of the averaged model and of the nodes' own ones."""
    batches = sorted({r["batch"] for r in records})
    rows = []
    for topology, method in dict.fromkeys((r["topology"], r["method"]) for r in records):
        mine = where(records, topology=topology, method=method)
        row: Record = {"topology": topology, "method": method, **cells_by_batch(mine, batches)}
        row["disagreement_per_step"] = mine[0]["growth"]
        theirs = paper.TOPOLOGIES.get(topology) if method == "decentlam" else None
        row["paper:_ImageNet_16K/32K"] = paper.line(theirs)
        rows.append(row)
    return rows


def notes(setting: Topologies, records: Sequence[Record]) -> list[str]:
    rates = ", ".join(
        f"{setting.lr * b / setting.batches[-1]:g} at batch {b:,}" for b in setting.batches
    )
    return [
        f"{accuracy_note(setting, f' of {setting.data}')}; {setting.model}, {setting.nodes} nodes, "
        f"{setting.shards}, momentum {setting.momentum:g}, {setting.epochs:g} epochs of which a "
        f"tenth is warm-up, then a constant lr: {rates}; the same for every method.",
        "Disagreement per step is what one step multiplies the disagreement of the nodes by in the "
        "long run, without gradients, as `decentlam.growth` predicts it: above 1 the method is "
        "unstable there whatever the learning rate.",
        *_unstable(setting, records),
        *_leads(setting, records),
    ]


def _unstable(setting: Topologies, records: Sequence[Record]) -> list[str]:
    found = []
    for method, topology in dict.fromkeys((r["method"], r["topology"]) for r in records):
        mine = where(records, method=method, topology=topology)
        lost = sum(r["status"] == "diverged" for r in mine)
        if lost or (mine[0]["growth"] or 0) > 1:
            found.append(
                f"{method} on {topology} multiplies the disagreement by {mine[0]['growth']:.3f} "
                f"per step; {lost} of {len(mine)} runs end in numbers that are not finite."
            )
            if method == "decentlam" and STEADY in {r["method"] for r in records}:
                found[-1] += (
                    " The paper reports finite figures for it there, and assumes fixed weights in "
                    f"its theory; {STEADY} is the method made for such weights."
                )
    return found


def _leads(setting: Topologies, records: Sequence[Record]) -> list[str]:
    """Return the leads over DmSGD on the same topology, seed by seed."""
    parts = []
    for topology in setting.topologies:
        for ours in ("decentlam", STEADY):
            here = where(records, topology=topology, batch=setting.batches[-1])
            if leads(here, ours, "dmsgd"):
                parts.append(f"{ours} on {topology} {lead_text(here, ours)}")
    if not parts:
        return []
    return [f"Lead over dmsgd at batch {setting.batches[-1]:,} in points: {'; '.join(parts)}."]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw a panel per batch: every seed on every topology."""
    batches = sorted({r["batch"] for r in records})
    titles = {f"batch {batch:,}": where(records, batch=batch) for batch in batches}
    return {"topologies": dot_panels(titles, "topology")}


_SUMMARY = "accuracy on ring, mesh, exponential and random-match graphs (Table 5)"
STUDY = Study("topologies", _SUMMARY, recipe, run, table, notes, figures, resumable=True)
